#define LAB_NO_COPIES
#include "kernels/persistent.cuh"
