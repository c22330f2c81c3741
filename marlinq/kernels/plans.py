"""What calls of the operator with the same weight share, checked and prepared once.

An eager call costs the host more than many of these products cost the GPU, so whatever depends on the
weight alone is kept for as long as its tensors live.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from marlinq.kernels.decision import Demands, demands
from marlinq.kernels.launch import Call, prepare
from marlinq.kernels.operands import Operands

_MAX_CALLS = 512  # batch sizes a weight

Key = tuple[object, ...]
Weight = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Words, scales, zero points and bias, as the operator takes them."""


class Plan:
    """The checked operands of one weight and their prepared launches.

    Args:
        weight: words int32 [K/16, 2N], scales [G, N], zero points [G, N] or None, bias [N] or None.
        group_size: 32, 64, 128 or -1, as the kernels take it.
        evict: called when one of the tensors goes.
    """

    __slots__ = ("_addresses", "_calls", "_group_size", "_index", "_k", "_n", "_tensors")

    def __init__(self, weight: Weight, group_size: int, evict: Callable[[object], object]) -> None:
        words = weight[0]
        self._k, self._n = words.shape[0] * 16, words.shape[1] // 2
        self._index = words.device.index
        self._group_size = group_size
        self._tensors = [None if tensor is None else weakref.ref(tensor, evict) for tensor in weight]
        self._addresses = _addresses(*weight)
        self._calls: dict[tuple[int, Demands], Call] = {}

    def run(self, x: Tensor, weight: Weight) -> Tensor | None:
        """[..., N] in the dtype of ``x``; None where this call needs the operator's checks again."""
        address = x.data_ptr()
        if (
            x.shape[-1] != self._k
            or x.get_device() != self._index
            or address % 16
            or not x.is_contiguous()
            or self._addresses != _addresses(*weight)
        ):
            return None
        out = x.new_empty((*x.shape[:-1], self._n))
        m = x.numel() // self._k
        if m:
            demanded = demands()
            call = self._calls.get((m, demanded))
            if call is None:
                rows = Operands(x.view(m, self._k), *weight, out.view(m, self._n))
                if len(self._calls) == _MAX_CALLS:
                    self._calls.clear()
                call = self._calls[m, demanded] = prepare(rows, self._group_size)
            call.start(address, self._k, out.data_ptr())
        return out


def _addresses(
    words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None
) -> tuple[int, int, int, int]:
    return (
        words.data_ptr(),
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )


_plans: dict[Key, Plan] = {}
find = _plans.get


def key_of(weight: Weight, group_size: int, out_features: int, dtype: torch.dtype) -> Key:
    """What a plan is found by: the identity of the tensors, which it outlives none of."""
    words, scales, zeros, bias = weight
    return id(words), id(scales), id(zeros), id(bias), group_size, out_features, dtype


def remember(key: Key, weight: Weight, group_size: int) -> None:
    """Keep a plan for operands that have been checked, until one of them goes."""
    # At the interpreter's end tensors may go after this module's names.
    evict = partial(_plans.pop, key)
    _plans[key] = Plan(weight, group_size, evict)
