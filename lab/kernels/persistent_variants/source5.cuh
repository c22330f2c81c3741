#define LAB_SOURCE 5
#include "kernels/persistent.cuh"
