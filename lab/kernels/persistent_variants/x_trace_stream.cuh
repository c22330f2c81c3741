#define LAB_TRACE
#define LAB_NO_WAIT 1
#define LAB_NO_PRODUCTS 1
#include "kernels/persistent.cuh"
