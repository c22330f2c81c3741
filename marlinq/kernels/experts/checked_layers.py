"""Layers whose weights have been checked, so that further calls check the batch alone.

Checks and decisions take the host longer than many layers take the GPU. So they are kept for each layer's
weights as long as these live; layers of the same sizes share their launches (:func:`layer_call`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from marlinq.kernels.experts.configurations import ExpertsShape
from marlinq.kernels.experts.launch import LayerCall, first_overlaps, layer_call
from marlinq.kernels.experts.steps import Inputs, WeightAddresses
from marlinq.kernels.experts.stored_experts import ExpertWeights
from marlinq.kernels.launch.prepared import address

_MAX_CALLS = 512  # batches that a layer keeps launches for

Key = tuple[object, ...]
"""``id`` of a layer's tensors, none of which its entry outlives, and its other arguments."""


class CheckedLayer:
    """The operands of one layer, checked but for a batch's.

    Args:
        tensors: the operator's tensors behind x, ids and weights; None for what is absent.
        experts: the weights among ``tensors`` as one value; they lie on a GPU.
        activation: name of the function between the products.
        expert_map: None or the map from the router's experts to this GPU's.
        evict: called when one of the tensors is garbage-collected.
    """

    __slots__ = (
        "_activation",
        "_addresses",
        "_calls",
        "_dtype",
        "_index",
        "_map",
        "_map_size",
        "_shape",
        "_tensors",
        "_weights",
    )

    def __init__(
        self,
        tensors: Sequence[Tensor | None],
        experts: ExpertWeights,
        activation: str,
        expert_map: Tensor | None,
        evict: Callable[[object], object],
    ) -> None:
        self._tensors = [weakref.ref(tensor, evict) for tensor in tensors if tensor is not None]
        self._addresses = [address(tensor) for tensor in tensors]
        self._weights = [WeightAddresses.of(stored) for stored in experts]
        self._map, self._map_size = address(expert_map), 0 if expert_map is None else expert_map.shape[0]
        self._activation, self._dtype = activation, experts.down.scales.dtype
        self._index = experts.down.words.get_device()
        # For one row and one expert a row.
        self._shape = ExpertsShape.of(1, 1, experts)
        self._calls: dict[tuple[object, ...], LayerCall] = {}

    def fits(self, tensors: Sequence[Tensor | None]) -> bool:
        """Whether the tensors have the addresses that were checked."""
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors] == self._addresses

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """The layer's result [M, H]; None where this call has to go through the operator's checks."""
        # Every eager call runs these lines; lab/kernels/host_cost.py measures their time.
        index = self._index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(x, ids, weights, tensors)
        shape, at = ids.shape, x.data_ptr()
        if (
            x.dtype != self._dtype
            or weights.dtype != torch.float32
            or weights.shape != shape
            or at % 16
            or not (x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous())
            or not x.get_device() == ids.get_device() == weights.get_device() == index
            or not self.fits(tensors)
        ):
            return None
        key = x.shape, shape, ids.dtype, first_overlaps()
        call = self._calls.get(key)
        if call is None:
            call = self._call(x, ids)
            if call is None:
                return None
            if len(self._calls) >= _MAX_CALLS:
                self._calls.clear()
            self._calls[key] = call
        return call.run(at, ids.data_ptr(), weights.data_ptr(), self._map, *self._weights)

    def _call(self, x: Tensor, ids: Tensor) -> LayerCall | None:
        """The launches for a batch; None for what the operator refuses or answers without launching."""
        hidden = self._shape.hidden
        if x.dim() != 2 or x.shape[1] != hidden or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
            return None
        if not ids.numel() or ids.dtype not in (torch.int32, torch.int64):
            return None
        return layer_call(
            replace(self._shape, m=ids.shape[0], top=ids.shape[1]),
            Inputs(self._activation, ids.dtype == torch.int64, self._map_size, hidden),
            self._index,
            overlaps=first_overlaps(),
        )


_layers: dict[Key, CheckedLayer] = {}


def key_of(tensors: Sequence[Tensor | None], others: Sequence[object]) -> Key:
    """Key of a layer: the operator's arguments behind x, ids and weights."""
    return *map(id, tensors), *others


find = _layers.get


def remember(
    key: Key,
    tensors: Sequence[Tensor | None],
    experts: ExpertWeights,
    activation: str,
    expert_map: Tensor | None,
) -> None:
    """Keep a layer whose operands have been checked, until one of its tensors is garbage-collected."""
    known = find(key)
    if known is not None and known.fits(tensors):
        return
    # Bound now: at the interpreter's end tensors may be collected after this module's names.
    evict = partial(_layers.pop, key)
    _layers[key] = CheckedLayer(tensors, experts, activation, expert_map, evict)
