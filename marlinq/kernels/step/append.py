"""Queries, keys and values on their way into attention and cache: ``cuda/step/append.cuh``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marlinq.kernels.jit.instantiation import Instantiation
from marlinq.kernels.step.prepared import ELEMENTS, Prepared, address, check_rows

_WARPS = 8


@dataclass(frozen=True)
class HeadNorm:
    """A normalisation of queries or keys.

    Attributes:
        kind: as of :class:`marlinq.kernels.step.residual.RowNorm`.
        weight, bias: of one head [D], or of all heads, in the dtype of the activations; or None.
        eps, offset: as there.
        wide: whether all heads of a row are normalised together.
    """

    kind: Literal["RMS", "RMS_WIDE", "LAYER"]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float = 0.0
    wide: bool = False


class _Arguments(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("x", "q", "keys", "values", "table", "lengths"),
                *("query_weight", "query_bias", "key_weight", "key_bias"),
            )
        ),
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "turns", "tokens_each", "capacity")),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("query_weight_stride", "key_weight_stride")),
        *((name, ctypes.c_float) for name in ("query_eps", "query_offset", "key_eps", "key_offset")),
    )


def append(
    x: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    table: Tensor | None = None,
    interleaved: bool = False,
    query_norm: HeadNorm | None = None,
    key_norm: HeadNorm | None = None,
    tokens_each: int = 1,
    turns: int = 1,
    hold: bool = False,
) -> Prepared:
    """Normalise, rotate, and append to the cache.

    Args:
        x: [M, (H + 2 * KV) * D], queries, keys and values side by side.
        q: [M, H, D], contiguous: where queries go.
        keys, values: [B, KV, L, D], contiguous: the cache.
        lengths: int32 [B]; token t of sequence b goes to position ``lengths[b] + t``.
        table: float32 [L, channels / 2, 2], cosines and sines at every position; None without a rotation.
        interleaved: pairs are neighbours.
        query_norm, key_norm: in front of the rotation; both or none of them wide.
        tokens_each: T, with M = B * T.
        turns: of :class:`marlinq.models.anatomy.Slices`; 1 for norms over all heads.
        hold: whether the next kernel begins when everything before this one is done, instead of as soon as
            possible: what :attr:`marlinq.kernels.step.attend.Division.early` needs.

    Raises:
        ValueError: a tensor that the kernel can't load, or norms that it can't combine.
    """
    check_rows(x=x, q=q, keys=keys, values=values)
    m, heads, size = q.shape
    batch, kv_heads, capacity, _ = keys.shape
    if not (q.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("q, keys, values: expected contiguous tensors")
    if m != batch * tokens_each or x.shape[1] < (heads + 2 * kv_heads) * size:
        raise ValueError(f"x: expected {batch} times {tokens_each} rows, found {list(x.shape)}")
    if table is not None and (table.dtype != torch.float32 or table.shape[0] < capacity):
        raise ValueError(f"table: expected float32 for {capacity} positions, found {list(table.shape)}")
    norms = [norm for norm in (query_norm, key_norm) if norm is not None]
    wide = any(norm.wide for norm in norms)
    if heads % turns or kv_heads % turns or (wide and turns > 1):
        raise ValueError(f"turns: {turns} of {heads} and {kv_heads} heads")
    if wide and not all(norm.wide and norm.kind != "LAYER" for norm in norms):
        raise ValueError("norms over all heads: expected both to be so, and none to subtract a mean")
    parameters = (
        ("Element", ELEMENTS[x.dtype]),
        ("D", size),
        ("WARPS", _WARPS),
        ("HOLD", hold),
        ("CHANNELS", 0 if table is None else 2 * table.shape[1]),
        ("INTERLEAVED", interleaved),
        ("QUERY_NORM", f"Norm::{query_norm.kind if query_norm else 'NONE'}"),
        ("KEY_NORM", f"Norm::{key_norm.kind if key_norm else 'NONE'}"),
        ("WIDE", wide),
    )
    arguments = _Arguments(
        x=x.data_ptr(),
        q=q.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        table=address(table),
        lengths=lengths.data_ptr(),
        query_weight=address(query_norm.weight) if query_norm else 0,
        query_bias=address(query_norm.bias) if query_norm else 0,
        key_weight=address(key_norm.weight) if key_norm else 0,
        key_bias=address(key_norm.bias) if key_norm else 0,
        heads=heads,
        kv_heads=kv_heads,
        turns=turns,
        tokens_each=tokens_each,
        capacity=capacity,
        x_stride=x.stride(0),
        query_weight_stride=_weight_stride(query_norm, size),
        key_weight_stride=_weight_stride(key_norm, size),
        query_eps=query_norm.eps if query_norm else 0.0,
        query_offset=query_norm.offset if query_norm else 0.0,
        key_eps=key_norm.eps if key_norm else 0.0,
        key_offset=key_norm.offset if key_norm else 0.0,
    )
    grid = m * -(-(heads + 2 * kv_heads) // _WARPS)
    return Prepared(Instantiation("step/append.cuh", "step_append", parameters), grid, 32 * _WARPS, arguments)


def _weight_stride(norm: HeadNorm | None, size: int) -> int:
    """Elements from one head's weights to the next's: 0 where heads share them."""
    if norm is None or norm.weight is None or norm.weight.numel() == size:
        return 0
    return size
