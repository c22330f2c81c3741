#define LAB_WIDE 4
#include "kernels/persistent.cuh"
