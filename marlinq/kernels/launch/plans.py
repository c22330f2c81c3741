"""Plans: checks and launches that all calls of an operator with the same weight share.

A call through torch's dispatcher takes the host longer than many products take the GPU. So a plan keeps all
that depends on the weight alone, as long as the weight's tensors live.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.demands import Demands, demands
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.weight_formats import WeightFormat
from marlinq.kernels.driver.cuda_driver import empty_strided
from marlinq.kernels.launch.call import Call, dequantizes, prepare
from marlinq.kernels.launch.gather import Gathered, gathering

_MAX_CALLS = 512  # shapes of activations that a plan keeps launches for

Key = tuple[object, ...]
"""Key of a plan: ``id`` of the weight's tensors, none of which it outlives, and the call's other
arguments."""

Weight = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Words, scales, zero points, bias and order, as the operator takes them."""


class _Prepared(NamedTuple):
    """A launch for activations of one shape.

    Attributes:
        shape: shape of the result, with all N columns.
        strides: strides of the result, in elements.
        call: the launch; None where there are no rows.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    call: Call | Gathered | None


class Plan:
    """The checked operands of one weight and their prepared launches.

    Args:
        weight: words int32, scales [G, N], zero points [G, N] or None, bias [N] or None, order
            int32 [K] or None.
        granularity: granularity of the scales.
        out_features: columns to return.
        weight_format: format of the words.
        evict: called when one of the tensors is garbage-collected.
    """

    __slots__ = (
        "_bias",
        "_columns",
        "_dtype",
        "_format",
        "_granularity",
        "_index",
        "_k",
        "_n",
        "_order",
        "_prepared",
        "_scales",
        "_tensors",
        "_words",
        "_zeros",
    )

    def __init__(
        self,
        weight: Weight,
        granularity: Granularity,
        out_features: int,
        weight_format: WeightFormat,
        evict: Callable[[object], object],
    ) -> None:
        words, scales, zeros, bias, order = weight
        self._format = weight_format
        self._k, self._n = weight_format.shape(words)
        self._columns = None if out_features == self._n else out_features
        self._dtype = scales.dtype
        self._index = words.get_device()
        self._granularity = granularity
        self._tensors = [None if tensor is None else weakref.ref(tensor, evict) for tensor in weight]
        self._words, self._scales = words.data_ptr(), scales.data_ptr()
        self._zeros, self._bias, self._order = _address(zeros), _address(bias), _address(order)
        self._prepared: dict[tuple[torch.Size, Demands], _Prepared] = {}

    def fits(
        self,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        order: Tensor | None,
    ) -> bool:
        """Whether the weight's tensors have the addresses that the plan was made for."""
        return (
            words.data_ptr() == self._words
            and scales.data_ptr() == self._scales
            and (zeros is None or zeros.data_ptr() == self._zeros)
            and (bias is None or bias.data_ptr() == self._bias)
            and (order is None or order.data_ptr() == self._order)
        )

    def run(
        self,
        x: Tensor,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        order: Tensor | None,
    ) -> Tensor | None:
        """[..., columns] in the dtype of ``x``; None where this call has to go through the operator's
        checks."""
        # Every eager call runs these lines; lab/kernels/host_cost.py measures their time.
        if torch._C._cuda_getDevice() != self._index:
            with torch.cuda.device(self._index):
                return self.run(x, words, scales, zeros, bias, order)
        address = x.data_ptr()
        if (
            address % 16
            or not x.is_contiguous()
            or x.get_device() != self._index
            or not self.fits(words, scales, zeros, bias, order)
        ):
            return None
        shape = x.shape
        prepared = self._prepared.get((shape, demands()))
        if prepared is None:
            if order is None and shape[-1] != self._k:
                return None
            prepared = self._prepare(x, (words, scales, zeros, bias, order))
            if prepared is None:
                return None
        out = empty_strided(prepared.shape, prepared.strides, self._dtype)
        if prepared.call is not None:
            prepared.call.start(address, out.data_ptr())
        return out if self._columns is None else out[..., : self._columns]

    def _prepare(self, x: Tensor, weight: Weight) -> _Prepared | None:
        """The launch for activations like ``x``; None where the weight is dequantised for this batch."""
        words, scales, zeros, bias, order = weight
        operand = Operand.whole(self._format, self._granularity, words, scales, zeros, order)
        *batch, columns = x.shape
        rows = math.prod(batch)
        if rows and dequantizes(operand.problem(rows), self._index):
            return None
        out = x.new_empty((*batch, self._n))
        call: Call | Gathered | None = None
        if rows:
            flat = x.view(rows, columns)
            taken = flat if order is None else x.new_empty((rows, self._k))
            operands = ProductTensors(taken, operand, bias, out.view(rows, self._n))
            call = prepare(operands, behind_own=order is not None)
            if order is not None:
                call = Gathered(gathering(flat, order), order.data_ptr(), rows, self._k, self._dtype, call)
        if len(self._prepared) >= _MAX_CALLS:
            self._prepared.clear()
        prepared = _Prepared(tuple(out.shape), out.stride(), call)
        self._prepared[x.shape, demands()] = prepared
        return prepared


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_plans: dict[Key, Plan] = {}
find = _plans.get


def remember(
    key: Key, weight: Weight, granularity: Granularity, out_features: int, weight_format: WeightFormat
) -> None:
    """Keep a plan for operands that have been checked, until one of them is garbage-collected."""
    known = find(key)
    if known is None or not known.fits(*weight):
        # Bound now: at the interpreter's end tensors may be collected after this module's names.
        evict = partial(_plans.pop, key)
        _plans[key] = Plan(weight, granularity, out_features, weight_format, evict)
