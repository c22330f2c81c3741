#define LAB_POLL 3
#include "kernels/persistent.cuh"
