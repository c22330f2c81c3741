"""Products of 16-bit weights: cuBLAS, and torch's grouped product of experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from marlinq.core.errors import UnsupportedError
from marlinq.kernels.experts import ExpertWeights, StoredExperts
from marlinq.kernels.experts.experts_reference import expert_matrix
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.peers.contenders import Routing, Run, RunLayer
from marlinq.operations.bench.synthetic_experts import gate_then_up
from marlinq.operations.bench.weights import Weight


class Cublas:
    """A dense product of 16-bit weights stored [N, K], as ``nn.Linear`` runs it."""

    name = "cublas"
    any_format = True

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        return None

    def nbytes(self, weight: Weight) -> int:
        return 2 * weight.layer.n * weight.layer.k

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        dense = weight.dense().to(weight.scales.dtype).t().contiguous()
        weights = [dense, *(dense.clone() for _ in range(copies - 1))]
        return lambda copy, x: torch.mm(x, weights[copy].t())


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

    def load(
        self, layer: ExpertsLayer, weights: ExpertWeights, scale_dtype: torch.dtype | None = None
    ) -> None:
        self._layer = layer
        self._gate_up = _dense(weights.gate_up, gate_then_up(layer, weights))
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


class TorchGroupedExperts(_DenseExperts):
    """torch's grouped product (CUTLASS), one launch for all experts; of bfloat16 alone."""

    name = "grouped_mm"

    def load(
        self, layer: ExpertsLayer, weights: ExpertWeights, scale_dtype: torch.dtype | None = None
    ) -> None:
        if weights.down.scales.dtype != torch.bfloat16:
            raise UnsupportedError("torch's grouped product takes bfloat16 only; add --dtype bfloat16")
        super().load(layer, weights)

    def _product(self, rows: Tensor, weights: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)


def _dense(stored: StoredExperts, columns: Tensor | None) -> Tensor:
    """[E, N, K], as linears have them, of the scales' dtype; columns reordered."""
    experts, k, n = stored.shape
    dense = torch.empty(experts, n, k, dtype=stored.scales.dtype, device=stored.words.device)
    for expert in range(experts):
        matrix = expert_matrix(stored, expert)
        dense[expert] = (matrix if columns is None else matrix[:, columns]).t()
    return dense
