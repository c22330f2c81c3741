#define LAB_TRACE
#define LAB_NO_PRODUCTS
#define LAB_NO_COPIES
#include "kernels/persistent.cuh"
