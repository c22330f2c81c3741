#define LAB_BARE 1
#define LAB_SOURCE 0
#include "kernels/persistent.cuh"
