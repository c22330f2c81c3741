#define LAB_POLL 1
#include "kernels/persistent.cuh"
