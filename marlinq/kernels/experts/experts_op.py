"""``torch.ops.marlinq.routed_experts``: the routed part of a mixture layer whose experts stay packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.problem import GRANULARITIES
from marlinq.kernels.contract.weight_formats import WEIGHT_FORMATS
from marlinq.kernels.experts.experts_reference import ACTIVATIONS, reference_experts
from marlinq.kernels.experts.stored_experts import ExpertWeights, StoredExperts
from marlinq.kernels.ops.definition import define_operator

_NAME = "routed_experts"
_SCHEMA = (
    "(Tensor x, Tensor ids, Tensor weights, "
    "Tensor gate_up_words, Tensor gate_up_scales, Tensor? gate_up_zeros, "
    "Tensor down_words, Tensor down_scales, Tensor? down_zeros, "
    "str weight_format, int group_size, str activation, Tensor? expert_map=None, "
    "Tensor? gate_up_bias=None, Tensor? down_bias=None) -> Tensor"
)


def routed_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str = "silu",
    expert_map: Tensor | None = None,
) -> Tensor:
    """``out[m] = sum_s weights[m, s] * down(activation(gate(x[m])) * up(x[m]))`` of expert ``ids[m, s]``.

    Args:
        x: [M, H] float16 or bfloat16, on the CPU also float32.
        ids: int32 or int64 [M, T], experts that the router chose; indices of no expert are skipped.
        weights: float32 [M, T], factors of the experts' results.
        experts: E experts of I channels, H and I multiples of 64.
        activation: name as in :data:`marlinq.kernels.experts.experts_reference.ACTIVATIONS`.
        expert_map: None or int32 [experts of the router], index of each expert among the E, or -1 for experts
            on another GPU.

    Returns:
        [M, H] in ``x.dtype``; zeros where none of a row's experts is among the E. The same call gives the
        same bits.

    Raises:
        ValueError: an operand's shape, dtype or device does not fit.
        UnsupportedError: a shape or dtype that the kernels can't run.
        EnvironmentProblem: CuPy, NVRTC or the driver is missing.
    """
    gate_up, down = experts
    if (gate_up.format, gate_up.granularity) != (down.format, down.granularity):
        raise ValueError("gate_up and down: expected one weight format and granularity")
    result: Tensor = torch.ops.marlinq.routed_experts.default(
        *(x, ids, weights, gate_up.words, gate_up.scales, gate_up.zeros, down.words, down.scales, down.zeros),
        *(down.format.name, down.granularity.group_size, activation, expert_map, gate_up.bias, down.bias),
    )
    return result


def check_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    activation: str,
    expert_map: Tensor | None,
) -> None:
    """Check the operands of a routed layer.

    Raises:
        ValueError: a shape, dtype or device does not fit the others.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    weight_format, granularity = experts.down.format, experts.down.granularity
    smallest = granularity.channels and granularity.channels < weight_format.smallest_group
    if weight_format.codec is None or granularity not in GRANULARITIES or smallest:
        raise ValueError(f"experts: no kernel multiplies {weight_format.name} with {granularity.describe()}")
    if experts.down.zeros is not None and not weight_format.stores_zeros:
        raise ValueError(f"zeros: {weight_format.name} weights have none")
    row_words = weight_format.row_words
    for name, stored in (("gate_up", experts.gate_up), ("down", experts.down)):
        words = stored.words
        if words.dtype != torch.int32 or words.dim() != 3 or words.shape[2] % (64 * row_words):
            raise ValueError(
                f"{name} words: expected int32 [E, K/{weight_format.row_channels}, {row_words}N], "
                f"N % 64 == 0, found {words.dtype} {list(words.shape)}"
            )
        count, k, n = stored.shape
        groups = granularity.groups(k)
        for kind, value in (("scales", stored.scales), ("zeros", stored.zeros)):
            if value is not None and (value.shape != (count, groups, n) or value.dtype != x.dtype):
                raise ValueError(
                    f"{name} {kind}: expected {x.dtype} [{count}, {groups}, {n}] with "
                    f"{granularity.describe()}, found {value.dtype} {list(value.shape)}"
                )
        if stored.bias is not None and (stored.bias.shape != (count, n) or stored.bias.dtype != x.dtype):
            raise ValueError(
                f"{name} bias: expected {x.dtype} [{count}, {n}], found {stored.bias.dtype} "
                f"{list(stored.bias.shape)}"
            )
        if k % 64 or not granularity.divides(k):
            raise ValueError(f"{name}: {k} channels are no multiple of 64 and of groups")
    count, k, n = experts.gate_up.shape
    if experts.down.shape != (count, n // 2, k) or n % 128:
        raise ValueError(
            f"down: expected {count} experts of {n // 2} channels and {k} columns to fit gate_up, "
            f"found {experts.down.shape}"
        )
    if (experts.gate_up.zeros is None) != (experts.down.zeros is None):
        raise ValueError("zeros: expected zero points of gate_up and down or of none")
    if (experts.gate_up.bias is None) != (experts.down.bias is None):
        raise ValueError("bias: expected biases of gate_up and down or of none")
    m = x.shape[0]
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"x: expected [M, {k}], found {list(x.shape)}")
    if ids.dim() != 2 or ids.shape[0] != m or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids: expected int32 or int64 [{m}, T], found {ids.dtype} {list(ids.shape)}")
    if weights.shape != ids.shape or weights.dtype != torch.float32:
        raise ValueError(
            f"weights: expected float32 {list(ids.shape)}, found {weights.dtype} {list(weights.shape)}"
        )
    if expert_map is not None and (expert_map.dim() != 1 or expert_map.dtype != torch.int32):
        raise ValueError(
            f"expert_map: expected int32 [experts], found {expert_map.dtype} {list(expert_map.shape)}"
        )
    named = {
        "ids": ids,
        "weights": weights,
        "expert_map": expert_map,
        **{f"gate_up {key}": value for key, value in experts.gate_up.tensors.items()},
        **{f"down {key}": value for key, value in experts.down.tensors.items()},
    }
    for name, value in named.items():
        if value is not None and (value.device != x.device or not value.is_contiguous()):
            raise ValueError(
                f"{name}: expected a contiguous tensor on {x.device}, the device of x, "
                f"found strides {value.stride()} on {value.device}"
            )


def _given(
    gate_up_words: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor | None,
    down_words: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor | None,
    weight_format: str,
    group_size: int,
    activation: str,
    expert_map: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> tuple[ExpertWeights, str, Tensor | None]:
    """Weights, activation and expert map, from the torch operator's arguments behind x, ids and weights."""
    dense = [name for name, each in WEIGHT_FORMATS.items() if each.sparsity is None]
    if weight_format not in dense:
        raise ValueError(f"weight_format: expected one of {', '.join(dense)}, found {weight_format!r}")
    kind = WEIGHT_FORMATS[weight_format], Granularity.from_group_size(group_size)
    gate_up = StoredExperts(*kind, gate_up_words, gate_up_scales, gate_up_zeros, gate_up_bias)
    down = StoredExperts(*kind, down_words, down_scales, down_zeros, down_bias)
    return ExpertWeights(gate_up, down), activation, expert_map


def _cpu(x: Tensor, ids: Tensor, weights: Tensor, *behind: Any) -> Tensor:
    given = _given(*behind)
    check_experts(x, ids, weights, *given)
    return reference_experts(x, ids, weights, *given)


def _cuda(x: Tensor, ids: Tensor, weights: Tensor, *behind: Any) -> Tensor:
    # Imported late: a machine without a GPU needs no launches.
    from marlinq.kernels.experts import checked_layers
    from marlinq.kernels.experts.launch import launch_experts

    tensors = *behind[:6], *behind[9:]
    key = checked_layers.key_of(tensors, behind[6:9])
    layer = checked_layers.find(key)
    found = None if layer is None else layer.run(x, ids, weights, tensors)
    if found is not None:
        return found
    given = _given(*behind)
    check_experts(x, ids, weights, *given)
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"{_NAME}: x has dtype {x.dtype}; the kernels take float16 and bfloat16")
    checked_layers.remember(key, tensors, *given)
    return launch_experts(x, ids, weights, *given)


def _meta(x: Tensor, *behind: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


define_operator(_NAME, _SCHEMA, _cuda, _cpu, _meta)
