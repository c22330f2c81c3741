#define LAB_TURNS 1
#define LAB_LATE_ROOT 1
#define LAB_PARTS_AT_ONCE 8
#include "kernels/persistent.cuh"
