"""Linear layers that multiply in a narrow dtype, in a model that stays float32 otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class NarrowLinears(TorchFunctionMode):
    """Inside, float32 linear layers round inputs, weights and results to another dtype and return float32.
    Unlike with autocast, norms, attention, activations and the residual stream stay float32.

    Args:
        dtype: dtype of the products.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.linear:
            return func(*args, **kwargs)
        operands = (*args, *kwargs.values())
        if any(isinstance(each, Tensor) and each.dtype != torch.float32 for each in operands):
            return func(*args, **kwargs)

        def narrow(value: Any) -> Any:
            return value.to(self._dtype) if isinstance(value, Tensor) else value

        result: Tensor = func(*map(narrow, args), **{key: narrow(value) for key, value in kwargs.items()})
        return result.to(torch.float32)
