#define LAB_FULL_POLL 1
#include "kernels/persistent.cuh"
