"""Random routed layers for the tests of experts: operands as the kernels take them, the layer in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.kernels.experts import ExpertWeights, StoredExperts, interleave_gate_up
from marlinq.kernels.experts.reference import activated, local_experts
from tests.kernels.problems import random_operands


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


@dataclass
class Layer:
    """Operands, and dense weights in float64: gate and up [E, H, I], down [E, I, H]."""

    shape: Shape
    weights: ExpertWeights
    gate: Tensor
    up: Tensor
    down: Tensor

    def reference(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        activation: str = "silu",
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """The float64 result, computed pair by pair from the dense weights."""
        local = local_experts(ids, self.shape.experts, expert_map)
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for m in range(x.shape[0]):
            for s in range(ids.shape[1]):
                expert = int(local[m, s])
                if expert < 0:
                    continue
                row = x[m].double()
                inner = activated(row @ self.gate[expert], activation) * (row @ self.up[expert])
                out[m] += weights[m, s].double() * (inner @ self.down[expert])
        return out


def _product(shape: Shape, k: int, n: int, device: str) -> tuple[StoredExperts, Tensor]:
    made = [
        random_operands(k, n, shape.group_size, shape.dtype, zeros=shape.zeros, device=device)
        for _ in range(shape.experts)
    ]
    zeros = [one.zeros for one in made if one.zeros is not None]
    stored = StoredExperts(
        torch.stack([one.words for one in made]),
        torch.stack([one.scales for one in made]),
        torch.stack(zeros) if zeros else None,
    )
    return stored, torch.stack([one.weight for one in made])


def random_layer(shape: Shape, device: str = "cpu") -> Layer:
    """Random experts; activations of :func:`random_routing` keep every step of the layer near one."""
    gate, dense_gate = _product(shape, shape.hidden, shape.inner, device)
    up, dense_up = _product(shape, shape.hidden, shape.inner, device)
    down, dense_down = _product(shape, shape.inner, shape.hidden, device)
    weights = ExpertWeights(interleave_gate_up(gate, up), down, shape.group_size)
    return Layer(shape, weights, dense_gate, dense_up, dense_down)


def random_routing(
    shape: Shape, m: int, device: str = "cpu", skew: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, H], ids [M, T] int32, none twice in a row, weights [M, T]; ``skew`` prefers low experts."""
    x = torch.randn(m, shape.hidden, device=device).to(shape.dtype)
    scores = torch.randn(m, shape.experts, device=device)
    scores -= skew * torch.arange(shape.experts, device=device)
    weights, ids = torch.softmax(scores, 1).topk(shape.top, 1)
    return x, ids.to(torch.int32), weights / weights.sum(1, keepdim=True)
