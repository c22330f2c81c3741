#define LAB_SOURCE 2
#include "kernels/persistent.cuh"
