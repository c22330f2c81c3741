#define LAB_NO_PRODUCTS 1
#include "kernels/persistent.cuh"
