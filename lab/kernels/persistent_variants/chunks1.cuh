#define LAB_LEAST_CHUNKS 1
#include "kernels/persistent.cuh"
