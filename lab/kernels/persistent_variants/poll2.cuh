#define LAB_POLL 2
#include "kernels/persistent.cuh"
