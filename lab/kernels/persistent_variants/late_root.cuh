#define LAB_LATE_ROOT 1
#include "kernels/persistent.cuh"
