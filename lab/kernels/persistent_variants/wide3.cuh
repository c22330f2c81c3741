#define LAB_WIDE 3
#include "kernels/persistent.cuh"
