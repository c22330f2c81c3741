#define LAB_BARE 1
#define LAB_SOURCE 5
#include "kernels/persistent.cuh"
