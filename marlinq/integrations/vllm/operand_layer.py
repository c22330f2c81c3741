"""A kernel's operand as parameters of a vLLM layer, and the product with them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.core.kept import one_process_at_a_time
from marlinq.integrations.vllm.interface import max_batched_tokens, replace_parameter

if TYPE_CHECKING:
    from marlinq.kernels import Operand

logger = logging.getLogger("vllm.plugins.marlinq")

SMALLEST_CAPABILITY = 80
"""lowest compute capability, times ten, that the kernels run on"""
# (shape, dtype, device) of layers whose kernels have been compiled and logged.
_prepared: set[tuple[object, ...]] = set()


class OperandLayer:
    """Puts an operand's tensors in the place of a layer's parameters, and multiplies with them.

    Args:
        layer: a linear layer of vLLM.
        operand: its weight.
        words: name of the layer's parameter that ``operand.words`` replace.
        scales: name of the one that ``operand.scales`` replace.
        zeros: name of the zero points; None where the layer has none.
        order: name of the activation order; None where the layer has none.
    """

    def __init__(
        self,
        layer: nn.Module,
        operand: Operand,
        words: str,
        scales: str,
        zeros: str | None = None,
        order: str | None = None,
    ) -> None:
        self._product: Callable[..., Tensor] = getattr(
            torch.ops.marlinq_early, operand.format.operator
        ).default
        self._group_size = operand.granularity.group_size
        self._out_features = operand.out_features
        self._padding = operand.padded_shape[0] - operand.in_features
        self._trimmed = operand.padded_shape[1] != operand.out_features
        self._words, self._scales = words, scales
        _replace(layer, words, operand.words)
        _replace(layer, scales, operand.scales)
        self._zeros = _replace(layer, zeros or "marlinq_zeros", operand.zeros)
        self._order = _replace(layer, order or "marlinq_order", operand.order)

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x`` [..., K] times the layer's weight, plus ``bias`` [N]."""
        order = getattr(layer, self._order) if self._order else None
        if self._padding and order is None:
            x = F.pad(x, (0, self._padding))
        out = self._product(
            x,
            getattr(layer, self._words),
            getattr(layer, self._scales),
            getattr(layer, self._zeros) if self._zeros else None,
            bias,
            self._group_size,
            self._out_features,
            order,
        )
        return out.contiguous() if self._trimmed else out


def _replace(layer: nn.Module, name: str, tensor: Tensor | None) -> str | None:
    """Replaces the parameter ``name`` by ``tensor`` and returns the name; with None, removes it and returns
    None."""
    if tensor is None:
        if hasattr(layer, name):
            delattr(layer, name)
        return None
    parameter = nn.Parameter(tensor, requires_grad=False)
    if hasattr(layer, name):
        replace_parameter(layer, name, parameter)
    else:
        layer.register_parameter(name, parameter)
    return name


def prepare(operand: Operand, dtype: torch.dtype) -> None:
    """Compiles the kernels of the operand's shape for every batch, and logs once which kernel runs.

    Args:
        operand: weight of a linear layer.
        dtype: dtype of the activations.
    """
    device = operand.words.device
    if device.type != "cuda":
        return
    from marlinq.kernels import LayerShape, explain, precompile_model

    shape = LayerShape.of(operand)
    key = shape, dtype, device.index
    if key in _prepared:
        return
    # Ranks of one host have the same shapes: the first compiles, the others find the kernels.
    with one_process_at_a_time():
        compiled = precompile_model([shape], dtype, device.index, most_rows=max_batched_tokens())
    # Only now: where compiling fails, it fails for each layer of this shape, and vLLM's kernels run all.
    _prepared.add(key)
    decision = explain(device, operand.problem(1))
    logger.info(
        "marlinq: layers of %d x %d, %s: %s%s",
        shape.k,
        shape.n,
        shape.granularity.describe(),
        decision.reason,
        f"; {compiled} kernels compiled" if compiled else "",
    )
