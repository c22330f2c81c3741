#include "kernels/persistent.cuh"
