#define LAB_LEAST_CHUNKS 2
#define LAB_PARTS_AT_ONCE 4
#include "kernels/persistent.cuh"
