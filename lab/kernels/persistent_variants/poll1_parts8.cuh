#define LAB_POLL 1
#define LAB_PARTS_AT_ONCE 8
#include "kernels/persistent.cuh"
