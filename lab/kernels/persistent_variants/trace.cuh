#define LAB_TRACE
#include "kernels/persistent.cuh"
