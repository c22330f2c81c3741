"""Random routed layers for the tests of experts: operands as the kernels take them, the layer in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import INT4, WeightFormat
from marlinq.kernels.experts import ExpertWeights, StoredExperts, interleave_gate_up
from marlinq.kernels.experts.experts_reference import gated_product, local_experts
from tests.kernels.problems import random_operands


def with_tensors(experts: ExpertWeights, change: Callable[[Tensor], Tensor]) -> ExpertWeights:
    """``experts`` with the result of ``change`` in the place of each of their tensors."""

    def changed(stored: StoredExperts) -> StoredExperts:
        values = {name: value for name, value in stored.tensors.items() if value is not None}
        return replace(stored, **{name: change(value) for name, value in values.items()})

    return ExpertWeights(*map(changed, experts))


@dataclass(frozen=True)
class Shape:
    """A layer: E experts of I channels on a hidden size of H, top-T."""

    experts: int
    top: int
    hidden: int
    inner: int
    group_size: int = 128
    zeros: bool = False
    dtype: torch.dtype = torch.float16
    biased: bool = False
    format: WeightFormat = INT4


@dataclass
class Layer:
    """Operands; dense weights in float64, gate and up [E, H, I], down [E, I, H]; their biases."""

    shape: Shape
    weights: ExpertWeights
    gate: Tensor
    up: Tensor
    down: Tensor
    biases: tuple[Tensor, Tensor, Tensor] | None

    def reference(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        activation: str = "silu",
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """The float64 result, computed expert by expert from the dense weights."""
        local = local_experts(ids, self.shape.experts, expert_map).flatten()
        sorted_pairs = local.argsort(stable=True)
        counts = torch.bincount(local + 1, minlength=self.shape.experts + 1).tolist()
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        # Those that are elsewhere are the first.
        for expert, pairs in enumerate(torch.split(sorted_pairs, counts), -1):
            if expert < 0 or not len(pairs):
                continue
            m = pairs // ids.shape[1]
            rows = x[m].double()
            of_gate, of_up, of_down = (
                (0.0, 0.0, 0.0) if self.biases is None else (bias[expert].double() for bias in self.biases)
            )
            gate, up = rows @ self.gate[expert] + of_gate, rows @ self.up[expert] + of_up
            product = gated_product(gate, up, activation) @ self.down[expert] + of_down
            out.index_add_(0, m, weights.flatten()[pairs, None].double() * product)
        return out


def _product(shape: Shape, k: int, n: int, device: str) -> tuple[StoredExperts, Tensor]:
    # The experts' weights are made as one, side by side: n is a multiple of a tile's columns, so that none
    # of its tiles belongs to two experts.
    made = random_operands(
        *(k, n * shape.experts, shape.group_size, shape.dtype),
        zeros=shape.zeros,
        device=device,
        weight_format=shape.format,
    )
    granularity = Granularity.from_group_size(shape.group_size)

    def of_experts(value: Tensor) -> Tensor:
        return value.view(len(value), shape.experts, -1).transpose(0, 1).contiguous()

    zeros = None if made.zeros is None else of_experts(made.zeros)
    bias = torch.randn(shape.experts, n, device=device).to(shape.dtype) if shape.biased else None
    stored = StoredExperts(
        shape.format, granularity, of_experts(made.words), of_experts(made.scales), zeros, bias
    )
    return stored, of_experts(made.weight)


def random_layer(shape: Shape, device: str = "cpu") -> Layer:
    """Random experts; activations of :func:`random_routing` keep every step of the layer near one."""
    gate, dense_gate = _product(shape, shape.hidden, shape.inner, device)
    up, dense_up = _product(shape, shape.hidden, shape.inner, device)
    down, dense_down = _product(shape, shape.inner, shape.hidden, device)
    weights = ExpertWeights(interleave_gate_up(gate, up), down)
    biases = None
    if gate.bias is not None and up.bias is not None and down.bias is not None:
        biases = gate.bias, up.bias, down.bias
    return Layer(shape, weights, dense_gate, dense_up, dense_down, biases)


def random_routing(
    shape: Shape, m: int, device: str = "cpu", skew: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, H], ids [M, T] int32, none twice in a row, weights [M, T]; ``skew`` prefers low experts."""
    x = torch.randn(m, shape.hidden, device=device).to(shape.dtype)
    scores = torch.randn(m, shape.experts, device=device)
    scores -= skew * torch.arange(shape.experts, device=device)
    weights, ids = torch.softmax(scores, 1).topk(shape.top, 1)
    return x, ids.to(torch.int32), weights / weights.sum(1, keepdim=True)
