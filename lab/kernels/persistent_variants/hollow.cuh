#define LAB_NO_COPIES
#define LAB_NO_PRODUCTS
#include "kernels/persistent.cuh"
