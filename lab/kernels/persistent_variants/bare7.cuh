#define LAB_BARE 1
#define LAB_SOURCE 7
#include "kernels/persistent.cuh"
