"""Types shared by all rooms of the kernels: weight formats, problems, devices, operands, configurations."""
