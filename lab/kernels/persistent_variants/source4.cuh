#define LAB_SOURCE 4
#include "kernels/persistent.cuh"
