"""The router of a mixture: choose the experts of each row (``cuda/step/router.cuh``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR, Prepared, address, check_rows
from marlinq.kernels.step.residual import RowNorm

MOST_EXPERTS, MOST_CHOSEN, MOST_GROUPS = 1024, 32, 32
"""Limits of the kernel: experts, experts of a row, and groups. A lane of a warp keeps one bit for each of its
logits, one chosen expert and one group."""

ROUTER_WIDEST = 8192
"""Channels of a row at most where the kernel also computes ``x`` (:class:`Addition`), in shared memory."""

_WARPS = 16
_CLUSTER = 8


@dataclass(frozen=True)
class Addition:
    """Addition and norm that make a router's input: ``stored = source + factor * first``, ``x =
    norm(stored)``.

    Attributes:
        source: [M, H], the residual stream.
        first: [M, H] with any row stride, added to it.
        stored: [M, H] with the strides of ``source`` in other memory; written.
        norm: norm of the sum.
        factor: factor of ``first``.
    """

    source: Tensor
    first: Tensor
    stored: Tensor
    norm: RowNorm
    factor: float


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("source", "first", "norm_weight", "norm_bias", "stored")),
        *((name, ctypes.c_void_p) for name in ("x", "weight", "gate", "bias", "correction", "factors")),
        *((name, ctypes.c_void_p) for name in ("ids", "weights", "gates")),
        ("experts", ctypes.c_int),
        ("width", ctypes.c_int),
        *((name, ctypes.c_longlong) for name in ("source_stride", "first_stride", "x_stride")),
        *((name, ctypes.c_float) for name in ("factor", "eps", "offset", "scale")),
    )


def router(
    x: Tensor,
    weight: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    scoring: str,
    normalised: bool,
    scale: float = 1.0,
    bias: Tensor | None = None,
    correction: Tensor | None = None,
    corrects_logits: bool = False,
    factors: Tensor | None = None,
    groups: int = 1,
    kept: int = 1,
    zeroed: bool = False,
    wide: bool = False,
    gate: Tensor | None = None,
    gates: Tensor | None = None,
    shared: int = 0,
    clusters: bool = True,
    addition: Addition | None = None,
) -> Prepared:
    """``ids`` and ``weights`` of the experts with the highest logits ``x @ weight.T + bias``.

    Logits are summed in float32. Among equal logits the expert of the lowest index is chosen.

    Args:
        x: [M, H]; written where there is an ``addition``.
        weight: [E, H], contiguous, in the dtype of ``x``; E at most :data:`MOST_EXPERTS`.
        ids: int32 [M, T + shared], T at most E, all at most :data:`MOST_CHOSEN`; written, highest score
            first.
        weights: float32 [M, T + shared]; written.
        scoring: ``softmax`` or ``sigmoid``.
        normalised: weights are divided by their sum before they are scaled.
        scale: factor on the weights.
        bias: float32 [E], added to logits before they are rounded; or None.
        correction: float32 [E], added to scores to choose experts; weights are made of scores alone. Or None.
        corrects_logits: whether the correction is added to logits instead.
        factors: float32 [E], factors on the experts' weights; or None.
        groups: number of groups of neighbouring experts, equal in size, two experts or more each; 1 without
            groups. A group's score is the sum of its two highest ``score + correction``, or its highest score
            without a correction.
        kept: groups with the highest scores, whose experts may be chosen; they have at least T experts.
        zeroed: whether experts of other groups take part with a corrected score of 0, instead of not at all.
        wide: whether logits stay in float32 instead of being rounded to the dtype of ``x``.
        gate: gate of a shared expert, [H] in the dtype of ``x``; or None.
        gates: float32 [M, 1]; written: ``sigmoid(x @ gate)``. None without ``gate``, or with ``shared``.
        shared: number of further experts, numbered from E on, that every row takes besides its T; each has
            weight ``sigmoid(x @ gate)``, or 1 without a gate.
        clusters: whether the GPU has clusters of blocks.
        addition: sum and norm that the kernel first makes ``x`` of; or None.

    Raises:
        ValueError: a tensor has a dtype, shape or alignment that the kernel can't load, or shapes don't fit
            each other.
    """
    check_rows(x=x, weight=weight)
    (m, width), (experts, top) = x.shape, (weight.shape[0], ids.shape[1] - shared)
    if weight.shape[1] != width or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(
            f"weight: expected {x.dtype} [E, {width}], found {weight.dtype} {list(weight.shape)}"
        )
    taken = ids.shape[1]
    if not 1 <= top <= experts or taken > MOST_CHOSEN or experts > MOST_EXPERTS:
        raise ValueError(f"{taken} of {experts} experts: expected up to {MOST_CHOSEN} of {MOST_EXPERTS}")
    for name, value, dtype in (("ids", ids, torch.int32), ("weights", weights, torch.float32)):
        shape = list(value.shape)
        if shape != [m, taken] or value.dtype != dtype or not value.is_contiguous():
            raise ValueError(f"{name}: expected {dtype} {[m, taken]}, found {value.dtype} {shape}")
    for name, vector in (("bias", bias), ("correction", correction), ("factors", factors)):
        if vector is not None and (
            vector.shape != (experts,) or vector.dtype != torch.float32 or not vector.is_contiguous()
        ):
            raise ValueError(
                f"{name}: expected float32 {[experts]}, found {vector.dtype} {list(vector.shape)}"
            )
    if groups > 1 and (
        (zeroed and correction is None)
        or experts % groups
        or experts // groups < 2
        or groups > MOST_GROUPS
        or not top * groups <= kept * experts <= groups * experts
    ):
        raise ValueError(
            f"{kept} of {groups} groups, {top} of {experts} experts: expected up to {MOST_GROUPS} groups "
            "of two or more experts, as many in those kept as are chosen, and a correction for zeros"
        )
    if (gates is not None) != (gate is not None and not shared):
        raise ValueError("gate and gates: expected both or none, and no gates of experts that are taken")
    if gate is not None and (gate.shape != (width,) or gate.dtype != x.dtype or not gate.is_contiguous()):
        raise ValueError(f"gate: expected {x.dtype} {[width]}, found {gate.dtype} {list(gate.shape)}")
    if gates is not None and (
        gates.shape != (m, 1) or gates.dtype != torch.float32 or not gates.is_contiguous()
    ):
        raise ValueError(f"gates: expected float32 {[m, 1]}, found {gates.dtype} {list(gates.shape)}")
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring {scoring!r}: expected softmax or sigmoid")
    if addition is not None:
        check_rows(source=addition.source, first=addition.first, stored=addition.stored)
        if width > ROUTER_WIDEST or addition.source.stride(0) != addition.stored.stride(0):
            raise ValueError(
                f"an addition: expected equal strides and at most {ROUTER_WIDEST} channels, found {width}"
            )
    cluster = _CLUSTER if clusters else 1
    parameters = (
        ("Element", ELEMENTS[x.dtype]),
        ("CLUSTER", cluster),
        ("WARPS", _WARPS),
        ("PER", 1 << (-(-experts // 32) - 1).bit_length()),
        ("TOP", top),
        ("SOFTMAX", scoring == "softmax"),
        ("NORMALISED", normalised),
        ("BIASED", bias is not None),
        ("CORRECTED", correction is not None),
        ("LOGITS_CORRECTED", corrects_logits),
        ("GROUPS", groups),
        ("KEPT", kept),
        ("ZEROED", zeroed),
        ("FACTORED", factors is not None),
        ("WIDE", wide),
        ("GATED", gate is not None),
        ("SHARED", shared),
        ("NORM", f"Norm::{addition.norm.kind if addition else 'NONE'}"),
        ("VECTORS", -(-width // (VECTOR * 32 * _WARPS)) if addition else 1),
    )
    norm = addition.norm if addition else None
    arguments = _Arguments(
        addition.source.data_ptr() if addition else 0,
        addition.first.data_ptr() if addition else 0,
        address(norm.weight) if norm else 0,
        address(norm.bias) if norm else 0,
        addition.stored.data_ptr() if addition else 0,
        x.data_ptr(),
        weight.data_ptr(),
        address(gate),
        address(bias),
        address(correction),
        address(factors),
        ids.data_ptr(),
        weights.data_ptr(),
        address(gates),
        experts,
        width,
        addition.source.stride(0) if addition else 0,
        addition.first.stride(0) if addition else 0,
        x.stride(0),
        addition.factor if addition else 0.0,
        norm.eps if norm else 0.0,
        norm.offset if norm else 0.0,
        scale,
    )
    instantiation = Instantiation("step/router.cuh", "step_router", parameters)
    return Prepared(instantiation, m * cluster, 32 * _WARPS, arguments)
