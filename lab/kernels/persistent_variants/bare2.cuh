#define LAB_BARE 1
#define LAB_SOURCE 2
#include "kernels/persistent.cuh"
