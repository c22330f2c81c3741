"""Add to the residual stream and normalise it, between two products (``cuda/step/residual.cuh``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR, Prepared, address, check_rows

_MOST_THREADS = 512
# Vectors of eight elements of a row that a thread can keep in registers.
_MOST_VECTORS = 4
WIDEST = _MOST_THREADS * _MOST_VECTORS * VECTOR
"""Channels of a row at most."""
WIDEST_SEVERAL = WIDEST // 2
"""Channels of a row at most where each addend is normalised, or the sum by more than one norm."""
MOST_FURTHER = 2
"""Norms at most, besides ``norm``, that one launch computes of the sum."""


@dataclass(frozen=True)
class RowNorm:
    """A normalisation over whole rows (:class:`marlinq.models.anatomy.Norm`).

    Attributes:
        kind: ``RMS``, ``RMS_WIDE`` (rounded after the product with the weight) or ``LAYER``.
        weight, bias: [width] in the dtype of the activations, or None.
        eps: number added to the mean square or the variance.
        offset: number added to the weight.
    """

    kind: Literal["RMS", "RMS_WIDE", "LAYER"]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float = 0.0


@dataclass(frozen=True)
class Gather:
    """Embeddings of tokens, with which the residual stream begins.

    Attributes:
        tokens: int64 [M], token of each row.
        embedding: [vocabulary, width].
        scale: factor on the tokens' embeddings.
        positions: learned embeddings of positions [most positions, width], added; or None.
        positions_offset: number added to a position before it is looked up.
    """

    tokens: Tensor
    embedding: Tensor
    scale: float = 1.0
    positions: Tensor | None = None
    positions_offset: int = 0


@dataclass(frozen=True)
class RoutedRows:
    """Results of experts that are not summed yet: row m is ``sum_s routing[m, s] * rows[places[m, s]]``,
    rounded.

    Attributes:
        rows: [pairs, width], a result for each pair of a row and an expert.
        places: int32 [M, T] or [M * T, 1], indices into ``rows``; -1 for experts on other GPUs.
        routing: float32 [M, T], factors of the experts.
    """

    rows: Tensor
    places: Tensor
    routing: Tensor


class _Norm(ctypes.Structure):
    """``RowNormGiven`` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "out")),
        ("stride", ctypes.c_longlong),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    )


class _Norms(ctypes.Structure):
    """``RowNormsGiven`` of the kernel."""

    _fields_ = (("own", _Norm * 2), ("further", _Norm * MOST_FURTHER))


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("tokens", "embedding", "positions", "lengths", "residual", "first", "second", "gates"),
                *("places", "routing"),
                *("post_weight", "post_bias", "weight", "bias", "stored", "out", "kept", "counter"),
            )
        ),
        *((name, ctypes.c_int) for name in ("counted", "width", "tokens_each", "positions_offset")),
        *(
            (name, ctypes.c_longlong)
            for name in ("residual_stride", "first_stride", "second_stride", "out_stride")
        ),
        *(
            (name, ctypes.c_float)
            for name in ("embedding_scale", "factor", "scale", "post_eps", "post_offset", "eps", "offset")
        ),
        ("others", _Norms),
    )


def residual(
    source: Tensor | Gather,
    *,
    stored: Tensor | None = None,
    out: Tensor | None = None,
    norm: RowNorm | None = None,
    first: Tensor | RoutedRows | None = None,
    second: Tensor | None = None,
    gates: Tensor | None = None,
    own: tuple[RowNorm, RowNorm] | None = None,
    post: RowNorm | None = None,
    further: Sequence[tuple[RowNorm, Tensor]] = (),
    factor: float = 1.0,
    scale: float = 1.0,
    lengths: Tensor | None = None,
    tokens_each: int = 1,
    counter: Tensor | None = None,
    kept: Tensor | None = None,
) -> Prepared:
    """Add to the residual stream and normalise it.

    ``x = scale * (source + factor * post(first + gates * second))``, rounded, goes to ``stored``, and
    ``norm(x)`` to ``out``.

    Args:
        source: [M, width], or embeddings.
        stored: [M, width] with the strides of ``source`` in other memory; written. None where nothing reads
            x.
        out: [M, width] with any row stride; written. None without ``norm``.
        norm: norm of x.
        first, second: [M, width] with any row stride, results of products; ``first`` may be of experts.
        gates: float32 [M, 1], factor of each row of ``second``; None for 1.
        own: norms of ``first`` and of ``second`` before they are added, of one kind; or None.
        post: norm of the rounded sum of both, or of ``first`` alone.
        further: norms of x besides ``norm`` and of its kind, at most :data:`MOST_FURTHER`, each with a tensor
            like ``out`` for its result, which is written.
        factor: factor of the added rows.
        scale: factor of the sum; 1 where nothing is added.
        lengths: int32 [B], tokens of each sequence before the new ones; needed for embeddings of positions.
        tokens_each: T, new tokens of each sequence; row m belongs to sequence m // T.
        counter: int32 [B], incremented by one at the end; or None.
        kept: [L, width], contiguous, or None; row m of ``norm(x)`` goes to its row ``counter[m]`` too. B is M
            then.

    Raises:
        ValueError: a tensor has a dtype, shape or alignment that the kernel can't load, more than
            :data:`WIDEST` channels, or norms that don't fit each other.
    """
    gather = source if isinstance(source, Gather) else None
    rows = source if isinstance(source, Tensor) else source.embedding
    routed = first if isinstance(first, RoutedRows) else None
    first = first.rows if isinstance(first, RoutedRows) else first
    results = {f"result {index}": result for index, (_, result) in enumerate(further)}
    check_rows(source=rows, stored=stored, out=out, first=first, second=second, kept=kept, **results)
    width = rows.shape[-1]
    if width > WIDEST:
        raise ValueError(f"rows of {width} channels; the kernel holds {WIDEST}")
    m = gather.tokens.shape[0] if gather else rows.shape[0]
    vectors = width // VECTOR
    each = -(-vectors // _MOST_THREADS)
    threads = -(-vectors // each // 32) * 32
    strides = {tensor.stride(0) for tensor in (stored, None if gather else rows) if tensor is not None}
    if len(strides) > 1 or (second is not None and first is None):
        raise ValueError("source and stored: expected equal strides; second: expected first")
    if (own is not None or further) and width > WIDEST_SEVERAL:
        raise ValueError(f"several norms of rows of {width} channels; the kernel holds {WIDEST_SEVERAL}")
    if own is not None and (second is None or own[0].kind != own[1].kind):
        raise ValueError("own norms: expected two addends, and norms of one kind")
    if len(further) > MOST_FURTHER or any(norm is None or each.kind != norm.kind for each, _ in further):
        raise ValueError(f"further norms: expected at most {MOST_FURTHER}, of the kind of norm")
    if gates is not None and (
        second is None or gates.shape != (m, 1) or gates.dtype != torch.float32 or not gates.is_contiguous()
    ):
        raise ValueError(
            f"gates: expected float32 {[m, 1]} of a second addend, found {gates.dtype} {list(gates.shape)}"
        )
    if routed:
        shape = routed.routing.shape
        fits = shape[0] == m and routed.places.numel() == routed.routing.numel()
        plain = routed.places.is_contiguous() and routed.routing.is_contiguous()
        if (
            not fits
            or not plain
            or (routed.places.dtype, routed.routing.dtype) != (torch.int32, torch.float32)
        ):
            raise ValueError(
                f"routed rows: expected contiguous int32 and float32 [{m}, T], found {list(shape)}"
            )
    if kept is not None and (
        norm is None or counter is None or len(counter) != m or not kept.is_contiguous()
    ):
        raise ValueError("kept: expected contiguous rows, a norm, and a counter of each row")
    positions = None if gather is None else gather.positions
    parameters = (
        ("Element", ELEMENTS[rows.dtype]),
        ("THREADS", threads),
        ("VECTORS", each),
        ("GATHER", gather is not None),
        ("POSITIONS", positions is not None),
        ("ADDENDS", (first is not None) + (second is not None)),
        ("EXPERTS", routed.routing.shape[1] if routed else 0),
        ("GATED", gates is not None),
        ("OWN", _kind(own[0] if own else None)),
        ("POST", _kind(post)),
        ("NORM", _kind(norm)),
        ("FURTHER", len(further)),
        ("KEEPS", kept is not None),
    )
    others = _Norms(
        own=(_Norm * 2)(*(_norm(each) for each in own or ())),
        further=(_Norm * MOST_FURTHER)(*(_norm(*each) for each in further)),
    )
    arguments = _Arguments(
        tokens=0 if gather is None else gather.tokens.data_ptr(),
        embedding=0 if gather is None else gather.embedding.data_ptr(),
        positions=address(positions),
        lengths=address(lengths),
        residual=0 if gather else rows.data_ptr(),
        first=address(first),
        second=address(second),
        gates=address(gates),
        places=routed.places.data_ptr() if routed else 0,
        routing=routed.routing.data_ptr() if routed else 0,
        post_weight=address(post.weight) if post else 0,
        post_bias=address(post.bias) if post else 0,
        weight=address(norm.weight) if norm else 0,
        bias=address(norm.bias) if norm else 0,
        stored=address(stored),
        out=address(out),
        kept=address(kept),
        counter=address(counter),
        counted=0 if counter is None else counter.shape[0],
        width=width,
        tokens_each=tokens_each,
        positions_offset=gather.positions_offset if gather else 0,
        residual_stride=max(strides, default=0),
        first_stride=0 if first is None else first.stride(0),
        second_stride=0 if second is None else second.stride(0),
        out_stride=0 if out is None else out.stride(0),
        embedding_scale=gather.scale if gather else 1.0,
        factor=factor,
        scale=scale,
        post_eps=post.eps if post else 0.0,
        post_offset=post.offset if post else 0.0,
        eps=norm.eps if norm else 0.0,
        offset=norm.offset if norm else 0.0,
        others=others,
    )
    return Prepared(Instantiation("step/residual.cuh", "step_residual", parameters), m, threads, arguments)


def _norm(norm: RowNorm, out: Tensor | None = None) -> _Norm:
    stride = 0 if out is None else out.stride(0)
    return _Norm(address(norm.weight), address(norm.bias), address(out), stride, norm.eps, norm.offset)


def _kind(norm: RowNorm | None) -> str:
    return f"Norm::{norm.kind if norm else 'NONE'}"
