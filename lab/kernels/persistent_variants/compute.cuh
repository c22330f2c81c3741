#define LAB_NO_WAIT 1
#define LAB_NO_COPIES 1
#include "kernels/persistent.cuh"
