"""Normalise and rotate the queries and keys of a prompt; append keys and values to the cache
(``cuda/step/append.cuh``)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation, Parameters
from marlinq.kernels.launch.prepared import ELEMENTS, Prepared, check_rows
from marlinq.kernels.step.heads import HeadWork, NewHeads, head_parameters, new_heads

_WARPS = 8


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("given", NewHeads),
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "lengths")),
        *((name, ctypes.c_int) for name in ("tokens_each", "capacity")),
    )


def append(
    x: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    work: HeadWork,
    *,
    tokens_each: int = 1,
) -> Prepared:
    """Normalise and rotate queries and keys; append keys and values to the cache, unless they are another
    layer's.

    Args:
        x: [M, (H + 2 * KV) * D], queries, keys and values side by side, as far as ``work`` has them.
        q: [M, H, D], contiguous; written: the queries.
        keys, values: [B, KV, L, D], contiguous; the cache.
        lengths: int32 [B]; token t of sequence b goes to position ``lengths[b] + t``.
        work: norms and rotation of queries, keys and values.
        tokens_each: T, with M = B * T.

    Raises:
        ValueError: a tensor has a shape, dtype or alignment that the kernel can't load, or norms are of kinds
            that it can't combine.
    """
    check_rows(q=q, keys=keys, values=values)
    m, heads, size = q.shape
    batch, kv_heads, capacity, _ = keys.shape
    if not (q.is_contiguous() and keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("q, keys, values: expected contiguous tensors")
    if m != batch * tokens_each or x.shape[0] != m:
        raise ValueError(f"x: expected {batch} times {tokens_each} rows, found {list(x.shape)}")
    parameters: Parameters = (
        ("Element", ELEMENTS[x.dtype]),
        ("D", size),
        ("WARPS", _WARPS),
        *head_parameters(work),
    )
    arguments = _Arguments(
        given=new_heads(x, heads, keys, work),
        q=q.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        lengths=lengths.data_ptr(),
        tokens_each=tokens_each,
        capacity=capacity,
    )
    grid = m * -(-(heads + (0 if work.shared else 2 * kv_heads)) // _WARPS)
    return Prepared(Instantiation("step/append.cuh", "step_append", parameters), grid, 32 * _WARPS, arguments)
