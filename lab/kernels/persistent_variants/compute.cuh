#define LAB_NO_WAIT
#define LAB_NO_COPIES
#include "kernels/persistent.cuh"
