"""The kernels that multiply, one file each: candidates, cost, configuration and arguments."""
