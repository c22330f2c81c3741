"""Who computes a routed layer of experts: each contender packs the same codes and scales in its own way."""

from __future__ import annotations

import importlib.util
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from marlinq.core.errors import UnsupportedError
from marlinq.formats.layouts.marlin import permute_scales
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.experts import ExpertWeights, StoredExperts, routed_experts
from marlinq.kernels.experts.launch import Workspace, shape_of, start, sum_step
from marlinq.kernels.experts.layout import permute_single
from marlinq.kernels.experts.reference import expert_matrix
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.peers import _pack_rows


@dataclass(frozen=True)
class Routing:
    """What a router gives: ids int32 and weights float32 [M, T]."""

    ids: Tensor
    weights: Tensor


RunLayer = Callable[[int, Tensor], Tensor]
"""``run(number, x)``: the layer for x [M, H] with one of the prepared routings, [M, H]."""


class ExpertsContender(Protocol):
    """One implementation of a routed layer."""

    name: str

    def unavailable(self) -> str | None:
        """Why it can't run here, or None."""
        ...

    def load(self, layer: ExpertsLayer, weights: ExpertWeights) -> None:
        """Pack the experts."""
        ...

    def prepare(self, m: int, routings: Sequence[Routing]) -> RunLayer:
        """Get ready for batches of ``m`` rows."""
        ...


class MarlinqExperts:
    """The kernels of this package, through their torch operator: sorting, both products, sum."""

    name = "marlinq"

    def __init__(self) -> None:
        self._weights: ExpertWeights | None = None

    def unavailable(self) -> str | None:
        return None

    def load(self, layer: ExpertsLayer, weights: ExpertWeights) -> None:
        self._weights = weights

    def prepare(self, m: int, routings: Sequence[Routing]) -> RunLayer:
        weights = self._weights
        assert weights is not None

        def run(number: int, x: Tensor) -> Tensor:
            routing = routings[number]
            return routed_experts(x, routing.ids, routing.weights, weights)

        return run


class HummingExperts:
    """The package ``humming-kernels``: its indexed products and its activation.

    It has no kernel that sorts, so it is given sorted ids, outside of the time that is measured; and our
    kernel for the sum.
    """

    name = "humming"

    def __init__(self) -> None:
        self._layers: list[Any] = []
        self._weights: ExpertWeights | None = None
        self._layer: ExpertsLayer | None = None

    def unavailable(self) -> str | None:
        if importlib.util.find_spec("humming") is None:
            return "not installed; pip install humming-kernels==0.1.19"
        return None

    def load(self, layer: ExpertsLayer, weights: ExpertWeights) -> None:
        from humming.layer import HummingLayer

        if weights.down.format != INT4:
            raise UnsupportedError(f"it is measured with {INT4.name} weights alone")
        self._weights, self._layer = weights, layer
        order = _gate_then_up(layer, weights)
        self._layers = []
        for stored, columns in ((weights.gate_up, order), (weights.down, None)):
            experts, k, n = stored.shape
            config = {
                "dtype": "uint4",
                "group_size": stored.granularity.channels,
                "has_zero_point": stored.zeros is not None,
            }
            packed = HummingLayer(
                shape_n=n,
                shape_k=k,
                num_experts=experts,
                weight_config=config,
                torch_dtype=stored.scales.dtype,
            ).to(stored.words.device)
            made = [_natural(stored, expert, columns) for expert in range(experts)]
            tensors = {
                "weight": torch.stack([_pack_rows(codes.t()) for codes, _, _ in made]),
                "weight_scale": torch.stack([scales.t().contiguous() for _, scales, _ in made]),
            }
            if stored.zeros is not None:
                points = [zeros for _, _, zeros in made if zeros is not None]
                tensors["zero_point"] = torch.stack([_pack_rows(zeros).t().contiguous() for zeros in points])
            packed.load_from_tensors(tensors)
            packed.transform()
            self._layers.append(packed)

    def prepare(self, m: int, routings: Sequence[Routing]) -> RunLayer:
        from humming.forward import may_process_input
        from humming.testing.data import generate_moe_tensors
        from humming.tune import get_heuristics_config

        layer, weights = self._layer, self._weights
        assert layer is not None
        assert weights is not None
        pairs = m * layer.top
        tunings, sorted_ids = [], []
        for packed in self._layers:
            chosen = get_heuristics_config(
                packed.humming_config, shape_m=pairs, gemm_type="indexed", device=packed.weight.device
            )
            tunings.append(json.dumps([[0, 1 << 30, chosen]]))
            block = chosen["block_shape"][0]
            sorted_ids.append(
                [
                    generate_moe_tensors(routing.ids, layer.experts, "indexed", block)[2:]
                    for routing in routings
                ]
            )
        compute = json.dumps({"gemm_type": "indexed"})
        places = torch.arange(pairs, dtype=torch.int32, device=routings[0].ids.device)

        def product(which: int, x: Tensor, number: int, top: int) -> Tensor:
            ids, experts, padded = sorted_ids[which][number]
            result: Tensor = self._layers[which](
                x,
                sorted_ids=ids,
                expert_ids=experts,
                num_tokens_padded=padded,
                top_k=top,
                compute_config=compute,
                tuning_config=tunings[which],
            )
            return result

        def run(number: int, x: Tensor) -> Tensor:
            routing = routings[number]
            both = product(0, x, number, layer.top)
            inner, _, _ = may_process_input(
                self._layers[1].humming_config,
                both,
                activation_type="binary_split",
                activation_impl="a / (1.f + __expf(-a)) * b",
            )
            rows = product(1, inner, number, 1)
            out = torch.empty_like(x)
            shape = shape_of(x, routing.ids, weights)
            nothing = rows[:0]
            workspace = Workspace(nothing, nothing, nothing, places, rows, nothing)
            start([sum_step(shape, routing.weights, out, workspace)], x.device.index)
            return out

        return run


class _DenseExperts(ABC):
    """Dense experts of 16 bits over pairs that are sorted before the time that is measured.

    Rows are gathered, multiplied expert by expert, activated, multiplied again, gathered back and summed with
    their weights; sizes are known to the host.
    """

    def __init__(self) -> None:
        self._gate_up = self._down = torch.empty(0)
        self._layer: ExpertsLayer | None = None

    def unavailable(self) -> str | None:
        return None

    def load(self, layer: ExpertsLayer, weights: ExpertWeights) -> None:
        self._layer = layer
        self._gate_up = _dense(weights.gate_up, _gate_then_up(layer, weights))
        self._down = _dense(weights.down, None)

    def prepare(self, m: int, routings: Sequence[Routing]) -> RunLayer:
        layer = self._layer
        assert layer is not None
        sorted_pairs = []
        for routing in routings:
            ids = routing.ids.flatten().long()
            order = torch.argsort(ids, stable=True)
            counts = torch.bincount(ids, minlength=layer.experts)
            ends = counts.cumsum(0).to(torch.int32)
            sorted_pairs.append((order // layer.top, torch.argsort(order), counts.tolist(), ends))

        def run(number: int, x: Tensor) -> Tensor:
            rows, back, counts, ends = sorted_pairs[number]
            gate, up = self._product(x[rows], self._gate_up, counts, ends).chunk(2, dim=1)
            result = self._product(functional.silu(gate) * up, self._down, counts, ends)
            weights = routings[number].weights.to(x.dtype).unsqueeze(1)
            return torch.bmm(weights, result[back].view(m, layer.top, -1)).squeeze(1)

        return run

    @abstractmethod
    def _product(self, rows: Tensor, weights: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
        """Sorted rows [P, K] times their expert's weight of [E, N, K]: [P, N].

        ``counts`` and ``ends`` are the rows of each expert, and where they end.
        """


class CublasExperts(_DenseExperts):
    """cuBLAS, one product for each expert that a row chose."""

    name = "cublas"

    def _product(self, rows: Tensor, weights: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
        result = rows.new_empty(len(rows), weights.shape[1])
        start = 0
        for weight, count in zip(weights, counts, strict=True):
            if count:
                torch.mm(rows[start : start + count], weight.t(), out=result[start : start + count])
            start += count
        return result


class GroupedExperts(_DenseExperts):
    """torch's grouped product (CUTLASS), one launch for all experts; of bfloat16 alone."""

    name = "grouped_mm"

    def load(self, layer: ExpertsLayer, weights: ExpertWeights) -> None:
        if weights.down.scales.dtype != torch.bfloat16:
            raise UnsupportedError("torch's grouped product multiplies bfloat16 alone; add --dtype bfloat16")
        super().load(layer, weights)

    def _product(self, rows: Tensor, weights: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _gate_then_up(layer: ExpertsLayer, weights: ExpertWeights) -> Tensor:
    """The stored columns, of which gate and up take turns in blocks of 16, in the order gate, then up."""
    blocks = torch.arange(2 * layer.inner, device=weights.down.words.device).view(-1, 2, 16)
    return blocks.transpose(0, 1).reshape(-1)


def _dense(stored: StoredExperts, columns: Tensor | None) -> Tensor:
    """[E, N, K], as linears have them, of the scales' dtype; columns reordered."""
    experts, k, n = stored.shape
    dense = torch.empty(experts, n, k, dtype=stored.scales.dtype, device=stored.words.device)
    for expert in range(experts):
        matrix = expert_matrix(stored, expert)
        dense[expert] = (matrix if columns is None else matrix[:, columns]).t()
    return dense


def _natural(
    stored: StoredExperts, expert: int, columns: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes uint8 [K, N], scales and zero points [G, N] of one expert in channel order, columns reordered."""
    words, scales = stored.words[expert], stored.scales[expert]
    codes = (INT4.dequantize(words, torch.ones_like(scales[:1]), None, torch.float32) + 8).to(torch.uint8)

    def ordered(value: Tensor) -> Tensor:
        found = permute_single(value[None])[0] if value.shape[0] == 1 else permute_scales(value)
        return found if columns is None else found[:, columns]

    zeros = None if stored.zeros is None else ordered(stored.zeros[expert]).to(torch.uint8)
    return codes if columns is None else codes[:, columns], ordered(scales), zeros


EXPERT_PEERS: dict[str, Callable[[], ExpertsContender]] = {
    contender.name: contender for contender in (HummingExperts, CublasExperts, GroupedExperts)
}
"""Peers by name."""
