#define LAB_NO_WAIT
#define LAB_NO_PRODUCTS
#include "kernels/persistent.cuh"
