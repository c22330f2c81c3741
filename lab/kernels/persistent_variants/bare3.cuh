#define LAB_BARE 1
#define LAB_SOURCE 3
#include "kernels/persistent.cuh"
