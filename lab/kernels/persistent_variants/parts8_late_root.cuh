#define LAB_PARTS_AT_ONCE 8
#define LAB_LATE_ROOT 1
#include "kernels/persistent.cuh"
