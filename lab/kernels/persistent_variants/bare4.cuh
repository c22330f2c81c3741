#define LAB_BARE 1
#define LAB_SOURCE 4
#include "kernels/persistent.cuh"
