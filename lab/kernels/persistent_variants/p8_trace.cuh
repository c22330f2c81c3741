#define LAB_LEAST_CHUNKS 2
#define LAB_PARTS_AT_ONCE 8
#define LAB_TRACE
#include "kernels/persistent.cuh"
