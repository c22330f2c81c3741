#define LAB_TRACE
#define LAB_NO_COPIES 1
#include "kernels/persistent.cuh"
