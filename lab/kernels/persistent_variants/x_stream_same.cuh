#define LAB_SAME_MAPS 1
#define LAB_NO_WAIT 1
#define LAB_NO_PRODUCTS 1
#include "kernels/persistent.cuh"
