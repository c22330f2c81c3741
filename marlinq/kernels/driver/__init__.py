"""From a source to a launch: NVRTC and its cache, the CUDA driver, the GPUs of this machine."""
