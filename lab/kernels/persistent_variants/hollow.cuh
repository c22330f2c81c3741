#define LAB_NO_COPIES 1
#define LAB_NO_PRODUCTS 1
#include "kernels/persistent.cuh"
