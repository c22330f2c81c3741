"""Compiling kernels with NVRTC, keeping them on disk, and launching them through the CUDA driver."""
