"""The linear layers that transformers' decoders are made of."""

from __future__ import annotations

from torch import nn
from transformers.pytorch_utils import Conv1D


def is_linear(module: nn.Module) -> bool:
    """True for the two linear layers that transformers' decoders are made of."""
    return isinstance(module, (nn.Linear, Conv1D))


def linear_shape(module: nn.Module) -> tuple[int, int]:
    """K and N of a module that :func:`is_linear`."""
    rows, columns = module.get_parameter("weight").shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def linear_weights(module: nn.Module) -> int:
    """Weights of all linear layers inside ``module``."""
    return sum(inner.get_parameter("weight").numel() for inner in module.modules() if is_linear(inner))
