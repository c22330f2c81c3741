#define LAB_LEAST_CHUNKS 4
#include "kernels/persistent.cuh"
