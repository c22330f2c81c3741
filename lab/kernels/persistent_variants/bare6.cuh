#define LAB_BARE 1
#define LAB_SOURCE 6
#include "kernels/persistent.cuh"
