#define LAB_BARE 1
#define LAB_SOURCE 1
#include "kernels/persistent.cuh"
