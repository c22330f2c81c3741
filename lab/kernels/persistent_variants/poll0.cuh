#define LAB_POLL 0
#include "kernels/persistent.cuh"
