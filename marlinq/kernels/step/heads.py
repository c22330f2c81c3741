"""Norms and rotation of the query and key heads of new tokens (``cuda/step/heads.cuh``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Parameters
from marlinq.kernels.launch.prepared import address, check_rows

Gates = Literal["none", "queries", "channels", "heads"]


@dataclass(frozen=True)
class HeadNorm:
    """A norm of queries or keys.

    Attributes:
        kind: ``RMS``, ``RMS_WIDE`` (rounded after the product with the weight) or ``LAYER``.
        weight, bias: [D] for one head, or [heads * D], in the dtype of the activations; or None.
        eps: number added to the mean square or the variance.
        offset: number added to the weight.
        wide: whether all heads of a row are normalised together.
    """

    kind: Literal["RMS", "RMS_WIDE", "LAYER"]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    offset: float = 0.0
    wide: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadWork:
    """Norms and rotation of queries and keys, and the order of their columns.

    Attributes:
        table: float32 [L, channels / 2, 2], cosines and sines at every position; None without a rotation.
        interleaved: whether the two channels that are rotated together are neighbours.
        query_norm, key_norm: norms before the rotation, or None; both wide or none.
        norms_behind: whether these norms are behind the rotation, not before it; not with wide ones.
        turns: runs in which queries, keys and values alternate (:class:`marlinq.models.anatomy.Slices`); 1
            for norms over all heads.
        gates: place of the gates that multiply attention's result: ``queries``: D of them behind each query
            head, not with norms over all heads; ``channels`` and ``heads``: behind all other columns of a
            row, one for each channel or each head of the result; ``none`` without gates.
        softplus: whether a gate's factor is its softplus, not its sigmoid.
        value_eps: number added to the mean square by which each head of values is normalised, without a
            weight; None where values are not normalised.
        keys_are_values: whether values are what was projected as keys, which have no columns of their own.
        shared: whether rows have queries alone, and keys and values are in the cache.
    """

    table: Tensor | None = None
    interleaved: bool = False
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    turns: int = 1
    gates: Gates = "none"
    softplus: bool = False
    value_eps: float | None = None
    keys_are_values: bool = False
    shared: bool = False
    norms_behind: bool = False

    @property
    def heads_each(self) -> int:
        """Runs of D columns for each query head."""
        return 2 if self.gates == "queries" else 1

    @property
    def keys_and_values(self) -> int:
        """Heads in a row of the product for each head of keys."""
        return 0 if self.shared else 1 if self.keys_are_values else 2


class NewHeads(ctypes.Structure):
    """Mirrored in the kernels."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "table", "query_weight", "query_bias", "key_weight", "key_bias")
        ),
        ("x_stride", ctypes.c_longlong),
        *(
            (name, ctypes.c_int)
            for name in (
                "heads",
                "kv_heads",
                "turns",
                "each",
                "values",
                "query_weight_stride",
                "key_weight_stride",
            )
        ),
        *(
            (name, ctypes.c_float)
            for name in ("query_eps", "query_offset", "key_eps", "key_offset", "value_eps")
        ),
    )


def head_parameters(work: HeadWork) -> Parameters:
    """Members of the kernels' configuration structs that ``work`` decides."""
    query_norm, key_norm = work.query_norm, work.key_norm
    wide = any(norm.wide for norm in (query_norm, key_norm) if norm is not None)
    return (
        ("CHANNELS", 0 if work.table is None else 2 * work.table.shape[1]),
        ("INTERLEAVED", work.interleaved),
        ("QUERY_NORM", f"Norm::{query_norm.kind if query_norm else 'NONE'}"),
        ("KEY_NORM", f"Norm::{key_norm.kind if key_norm else 'NONE'}"),
        ("VALUES_NORMED", work.value_eps is not None),
        ("SHARED", work.shared),
        ("WIDE", wide),
        ("NORMS_BEHIND", work.norms_behind),
    )


def new_heads(x: Tensor, heads: int, keys: Tensor, work: HeadWork) -> NewHeads:
    """The parameter ``given`` of the kernels.

    Args:
        x: [M, (heads + 2 * KV) * D], queries, keys and values side by side, with gates as ``work`` has them.
        heads: number of heads of queries.
        keys: [B, KV, L, D], the cache.
        work: norms and rotation.

    Raises:
        ValueError: a tensor has a shape, dtype or alignment that the kernels can't load, or norms are of
            kinds that they can't combine.
    """
    check_rows(x=x)
    _, kv_heads, capacity, size = keys.shape
    query_norm, key_norm, table, turns = work.query_norm, work.key_norm, work.table, work.turns
    each, others = work.heads_each, work.keys_and_values
    gates = {"channels": heads * size, "heads": heads}.get(work.gates, 0)
    if x.shape[1] < (each * heads + others * kv_heads) * size + gates:
        raise ValueError(
            f"x: expected {each * heads} + {others} * {kv_heads} heads of {size} and {gates} gates, "
            f"found {list(x.shape)}"
        )
    if table is not None and (table.dtype != torch.float32 or table.shape[0] < capacity):
        raise ValueError(f"table: expected float32 for {capacity} positions, found {list(table.shape)}")
    norms = [norm for norm in (query_norm, key_norm) if norm is not None]
    wide = any(norm.wide for norm in norms)
    if heads % turns or kv_heads % turns or (wide and turns > 1):
        raise ValueError(f"turns: {turns} of {heads} and {kv_heads} heads")
    if wide and (work.gates == "queries" or work.norms_behind):
        raise ValueError("norms over all heads: expected no gates between them, and no rotation before")
    if wide and not all(norm.wide and norm.kind != "LAYER" for norm in norms):
        raise ValueError("norms over all heads: expected both to be so, and none to subtract a mean")
    return NewHeads(
        x=x.data_ptr(),
        table=address(table),
        query_weight=address(query_norm.weight) if query_norm else 0,
        query_bias=address(query_norm.bias) if query_norm else 0,
        key_weight=address(key_norm.weight) if key_norm else 0,
        key_bias=address(key_norm.bias) if key_norm else 0,
        x_stride=x.stride(0),
        heads=heads,
        kv_heads=kv_heads,
        turns=turns,
        each=each,
        values=0 if work.keys_are_values else 1,
        query_weight_stride=_weight_stride(query_norm, size),
        key_weight_stride=_weight_stride(key_norm, size),
        query_eps=query_norm.eps if query_norm else 0.0,
        query_offset=query_norm.offset if query_norm else 0.0,
        key_eps=key_norm.eps if key_norm else 0.0,
        key_offset=key_norm.offset if key_norm else 0.0,
        value_eps=0.0 if work.value_eps is None else work.value_eps,
    )


def _weight_stride(norm: HeadNorm | None, size: int) -> int:
    """Elements from one head's weights to the next's: 0 where heads share them."""
    if norm is None or norm.weight is None or norm.weight.numel() == size:
        return 0
    return size
