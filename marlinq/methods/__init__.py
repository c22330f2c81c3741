"""How a weight becomes 4-bit: the recipe, the grids, round-to-nearest and GPTQ, as pure functions.

The solvers take tensors and return tensors; files, hooks, devices and progress belong to the pipeline.
Nothing is imported here, so that reading a recipe does not import torch.
"""
