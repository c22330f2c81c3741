#define LAB_TURNS 1
#include "kernels/persistent.cuh"
