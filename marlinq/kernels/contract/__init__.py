"""What every room of the kernels speaks: formats, problems, devices, operands, configurations, arguments."""
