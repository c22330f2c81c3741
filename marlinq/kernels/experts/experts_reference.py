"""The CPU reference of a routed layer, in plain torch arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from marlinq.kernels.experts.stored_experts import ExpertWeights, StoredExperts


def activated(gate: Tensor, activation: str) -> Tensor:
    """The activation of ``gate``; names are those of ``cuda/step/activate.cuh`` in lower case."""
    if activation == "silu":
        return functional.silu(gate)
    if activation == "gelu":
        return functional.gelu(gate)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh")
    if activation == "relu":
        return functional.relu(gate)
    if activation == "relu2":
        return functional.relu(gate).square()
    raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")


def gated_product(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``, the input of the down product.

    ``clamped_swiglu`` (GPT-OSS) is ``(up + 1) * gate * sigmoid(1.702 gate)``, with gate clamped to at most 7
    and up to -7 .. 7.
    """
    if activation == "clamped_swiglu":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return activated(gate, activation) * up


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
"""Names of the functions that turn gate and up into the input of the down product."""


def expert_matrix(stored: StoredExperts, expert: int) -> Tensor:
    """The dense weight [K, N] of one expert in float32."""
    zeros = None if stored.zeros is None else stored.zeros[expert]
    return stored.format.dequantize(stored.words[expert], stored.scales[expert], zeros, torch.float32)


def _biased(product: Tensor, stored: StoredExperts, expert: int) -> Tensor:
    return product if stored.bias is None else product + stored.bias[expert].float()


def local_experts(ids: Tensor, experts: int, expert_map: Tensor | None) -> Tensor:
    """Indices int64 of the experts ``ids`` among this GPU's ``experts``; -1 for those on other GPUs."""
    ids = ids.long()
    if expert_map is not None:
        known = (ids >= 0) & (ids < expert_map.shape[0])
        ids = expert_map.long()[ids.clamp(0, expert_map.shape[0] - 1)].where(known, -1)
    return ids.where((ids >= 0) & (ids < experts), -1)


def reference_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str,
    expert_map: Tensor | None = None,
) -> Tensor:
    """:func:`marlinq.kernels.experts.routed_experts` accumulated in float32 and rounded once at the end."""
    local = local_experts(ids, experts.down.shape[0], expert_map)
    out = torch.zeros(x.shape[0], experts.down.shape[2], dtype=torch.float32, device=x.device)
    for expert in sorted(set(local.flatten().tolist()) - {-1}):
        rows, slots = (local == expert).nonzero(as_tuple=True)
        gate_up, down = (expert_matrix(stored, expert) for stored in experts)
        both = _biased(x[rows].float() @ gate_up, experts.gate_up, expert)
        both = both.view(len(rows), -1, 2, 16)
        inner = gated_product(both[:, :, 0], both[:, :, 1], activation).flatten(1)
        product = _biased(inner @ down, experts.down, expert)
        out.index_add_(0, rows, product * weights[rows, slots, None].float())
    return out.to(x.dtype)
