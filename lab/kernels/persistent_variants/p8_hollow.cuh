#define LAB_LEAST_CHUNKS 2
#define LAB_PARTS_AT_ONCE 8
#define LAB_NO_COPIES 1
#define LAB_NO_PRODUCTS 1
#include "kernels/persistent.cuh"
