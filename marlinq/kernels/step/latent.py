"""Latent attention of one new token per sequence (``cuda/step/latent_*.cuh``).

Three kernels: queries absorb the keys' half of the expansion while the new rows of the cache are made;
attention over the cache, in splits; and the splits added and multiplied by the values' half.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation, Parameters
from marlinq.kernels.launch.prepared import ELEMENTS, Prepared, address, check_rows
from marlinq.kernels.step.residual import RowNorm

# Also constants in the kernels. Rows, columns and threads of a block of the products with heads' weights; and
# warps of a block of attention.
_ROWS, _COLUMNS, _THREADS = 8, 32, 256
_WARPS = 8
_MOST_HEADS = 32
"""Heads of a block of attention, at most."""
_MOST_SPLITS = 64
"""Splits of a sequence, at most: every block that adds them reads them all."""
_TILES = ((32, 3), (16, 2))
"""(positions of a tile, stages of the ring): the first pair that fits into shared memory is taken."""


@dataclass(frozen=True, eq=False)
class LatentWeights:
    """Parameters of latent attention besides its projections.

    Attributes:
        keys: [H, L, N], contiguous; turns a head's channels that are not rotated into those of a latent.
        values: [H, V, L], contiguous; turns a sum of latents into a head's result.
        norm: RMS norm of a latent.
        table: float32 [capacity, rotated channels / 2, 2], cosines and sines at every position.
        interleaved: whether the two channels that are rotated together are neighbours.
    """

    keys: Tensor
    values: Tensor
    norm: RowNorm
    table: Tensor
    interleaved: bool

    @property
    def heads(self) -> int:
        """Number of heads H."""
        return self.keys.shape[0]

    @property
    def latent_dim(self) -> int:
        """Channels L of a latent."""
        return self.keys.shape[1]

    @property
    def plain_dim(self) -> int:
        """Channels N of a head's query that are not rotated."""
        return self.keys.shape[2]

    @property
    def rotated_dim(self) -> int:
        """Rotated channels."""
        return 2 * self.table.shape[1]

    @property
    def value_dim(self) -> int:
        """Channels V of a head's result."""
        return self.values.shape[1]

    @property
    def width(self) -> int:
        """Channels of a row of the cache, and of an absorbed query."""
        return self.latent_dim + self.rotated_dim


class LatentDivision(NamedTuple):
    """How latent attention is divided among blocks.

    Attributes:
        splits: largest number of parts of each sequence's positions; a block takes one part.
        heads: heads of a block, a multiple of 8; those beyond the last are padding.
        tile: positions that a block reads at a time.
        stages: tiles that a block keeps or requests.
    """

    splits: int
    heads: int
    tile: int
    stages: int

    def shared_bytes(self, width: int) -> int:
        """Bytes of dynamic shared memory of a block; ``width``: channels of a row of the cache."""
        parts = _WARPS * 16 // self.tile
        scores = self.heads if self.heads % 16 else self.heads + 8
        rows = (self.stages * self.tile + self.heads) * (width + 8) * 2
        return rows + parts * self.tile * scores * 4 + self.heads * (self.tile + 8) * 2 + self.heads * 4


def latent_refusal(
    latent_dim: int, plain_dim: int, rotated_dim: int, value_dim: int, norm_kind: str
) -> str | None:
    """Why the kernels can't compute latent attention of these sizes, in one clause; None if they can."""
    if latent_dim % 128 or not 0 < latent_dim <= 512 or (latent_dim + rotated_dim) % 32 or rotated_dim % 8:
        return (
            f"latents of {latent_dim} channels with {rotated_dim} rotated ones; the kernels take multiples "
            "of 128 to 512, which with the rotated ones are multiples of 32"
        )
    if plain_dim % 32 or value_dim % 32:
        return f"heads of {plain_dim} plain and {value_dim} value channels; the kernels take multiples of 32"
    if norm_kind != "rms":
        return "a norm of latents that subtracts the mean"
    return None


def divide_latent(
    rows: int, heads: int, width: int, capacity: int, multiprocessors: int, shared_bytes: int
) -> LatentDivision:
    """The division for ``rows`` rows over caches of ``capacity`` positions of ``width`` channels.

    Sequences are split until their blocks fill the GPU.

    Raises:
        ValueError: ``shared_bytes`` of a block hold no tile.
    """
    each = min(_MOST_HEADS, -(-heads // 8) * 8)
    units = rows * -(-heads // each)
    for tile, stages in _TILES:
        splits = max(1, min(-(-capacity // tile), multiprocessors // units, _MOST_SPLITS))
        division = LatentDivision(splits, each, tile, stages)
        if division.shared_bytes(width) <= shared_bytes:
            return division
    raise ValueError(f"{shared_bytes} bytes of shared memory hold no tile of {width} channels")


class LatentWorkspace(NamedTuple):
    """Memory between the kernels, shared by layers that run one after another.

    Attributes:
        queries: absorbed queries, [rows * heads * width], in the dtype of activations.
        sums: float32, sums of latents of each row, split and head.
        totals: float32, maximum and total of each row, split and head.
    """

    queries: Tensor
    sums: Tensor
    totals: Tensor

    @classmethod
    def of(
        cls, rows: int, layers: Iterable[tuple[LatentWeights, LatentDivision]], dtype: torch.dtype
    ) -> LatentWorkspace | None:
        """Memory that suffices for each of these layers; None without layers."""
        queries = slots = sums = 0
        device = None
        for weights, division in layers:
            device = weights.keys.device
            queries = max(queries, rows * weights.heads * weights.width)
            slots = max(slots, rows * weights.heads * division.splits)
            sums = max(sums, rows * weights.heads * division.splits * weights.latent_dim)
        if device is None:
            return None
        return cls(
            torch.empty(queries, dtype=dtype, device=device),
            torch.empty(sums, dtype=torch.float32, device=device),
            torch.empty(2 * slots, dtype=torch.float32, device=device),
        )


class _Queries(ctypes.Structure):
    """Mirrored in the kernel."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "latent", "weight", "norm", "table", "out", "cache", "lengths")
        ),
        *((name, ctypes.c_longlong) for name in ("q_stride", "latent_stride")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "sequences", "capacity")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    )


class _QueriesArguments(ctypes.Structure):
    _fields_ = (("given", _Queries),)


class _Attention(ctypes.Structure):
    """Mirrored in the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "cache", "sums", "totals", "lengths")),
        *((name, ctypes.c_int) for name in ("heads", "sequences", "splits", "capacity")),
        ("scale", ctypes.c_float),
    )


class _AttentionArguments(ctypes.Structure):
    _fields_ = (("given", _Attention),)


class _Values(ctypes.Structure):
    """Mirrored in the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("sums", "totals", "weight", "out", "lengths")),
        ("out_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "heads", "splits", "capacity")),
    )


class _ValuesArguments(ctypes.Structure):
    _fields_ = (("given", _Values),)


def latent_queries(
    q: Tensor, latent: Tensor, cache: Tensor, lengths: Tensor, weights: LatentWeights, queries: Tensor
) -> Prepared:
    """Absorb and rotate the queries of new tokens; append their latents and rotated keys to the cache.

    Args:
        q: [M, H * (N + rotated channels)], heads side by side.
        latent: [M, L + rotated channels], latents before their norm, keys before their rotation.
        cache: [M, capacity, width], contiguous; or [1, capacity, width] for neighbouring tokens of one
            sequence.
        lengths: int32 [M], position of each token.
        weights: parameters and sizes.
        queries: [M, H, width], contiguous; written.

    Raises:
        ValueError: a tensor has a dtype, shape or alignment that the kernel can't load.
    """
    check_rows(q=q, latent=latent, cache=cache, queries=queries)
    _check_cache(cache, queries, weights)
    rows, heads = queries.shape[:2]
    refused = latent_refusal(
        weights.latent_dim, weights.plain_dim, weights.rotated_dim, weights.value_dim, "rms"
    )
    if refused is not None:
        raise ValueError(refused)
    if q.shape != (rows, heads * (weights.plain_dim + weights.rotated_dim)):
        raise ValueError(f"q: expected {rows} rows of {heads} heads, found {list(q.shape)}")
    if latent.shape[0] != rows or latent.shape[1] < weights.width:
        raise ValueError(f"latent: expected {[rows, weights.width]}, found {list(latent.shape)}")
    norm, table = weights.norm, weights.table
    if norm.kind == "LAYER" or norm.weight is None or norm.bias is not None:
        raise ValueError("norm of latents: expected an RMS norm with a weight and without a bias")
    if table.dtype != torch.float32 or table.shape[0] < cache.shape[1]:
        raise ValueError(f"table: expected float32 for {cache.shape[1]} positions, found {list(table.shape)}")
    parameters: Parameters = (
        ("Element", ELEMENTS[q.dtype]),
        ("IN", weights.plain_dim),
        ("OUT", weights.latent_dim),
        ("ROTATED", weights.rotated_dim),
        ("INTERLEAVED", weights.interleaved),
        ("NORM", f"Norm::{norm.kind}"),
    )
    given = _Queries(
        q=q.data_ptr(),
        latent=latent.data_ptr(),
        weight=weights.keys.data_ptr(),
        norm=address(norm.weight),
        table=table.data_ptr(),
        out=queries.data_ptr(),
        cache=cache.data_ptr(),
        lengths=lengths.data_ptr(),
        q_stride=q.stride(0),
        latent_stride=latent.stride(0),
        rows=rows,
        heads=heads,
        sequences=cache.shape[0],
        capacity=cache.shape[1],
        eps=norm.eps,
        offset=norm.offset,
    )
    grid = -(-rows // _ROWS) * heads * (weights.latent_dim // _COLUMNS) + rows
    instantiation = Instantiation("step/latent_queries.cuh", "step_latent_queries", parameters)
    return Prepared(instantiation, grid, _THREADS, _QueriesArguments(given))


def latent_attend(
    queries: Tensor,
    cache: Tensor,
    lengths: Tensor,
    weights: LatentWeights,
    workspace: LatentWorkspace,
    *,
    scale: float,
    division: LatentDivision,
) -> Prepared:
    """Sums of latents over positions 0 to ``lengths[m]``, of every row, split and head, into ``workspace``.

    If launched dependently, the kernel may read ``lengths`` and earlier rows of the cache while the stream's
    previous kernels still run.

    Args:
        queries: [M, H, width], contiguous, of :func:`latent_queries`.
        cache, lengths: as in :func:`latent_queries`.
        weights: parameters and sizes.
        workspace: made for these rows and this division.
        scale: factor on the dot products.
        division: from :func:`divide_latent`.

    Raises:
        ValueError: a tensor has a dtype, shape or alignment that the kernel can't load.
    """
    check_rows(queries=queries, cache=cache)
    _check_cache(cache, queries, weights)
    rows, heads = queries.shape[:2]
    if workspace.sums.numel() < rows * heads * division.splits * weights.latent_dim:
        raise ValueError(f"workspace: expected room for {rows} rows in {division.splits} splits")
    shared = division.shared_bytes(weights.width)
    parameters: Parameters = (
        ("Element", ELEMENTS[queries.dtype]),
        ("L", weights.latent_dim),
        ("WIDTH", weights.width),
        ("HEADS", division.heads),
        ("TILE", division.tile),
        ("STAGES", division.stages),
        ("SHARED_BYTES", shared),
    )
    given = _Attention(
        queries=queries.data_ptr(),
        cache=cache.data_ptr(),
        sums=workspace.sums.data_ptr(),
        totals=workspace.totals.data_ptr(),
        lengths=lengths.data_ptr(),
        heads=heads,
        sequences=cache.shape[0],
        splits=division.splits,
        capacity=cache.shape[1],
        # The kernel computes powers of 2 instead of e.
        scale=scale * math.log2(math.e),
    )
    grid = rows * -(-heads // division.heads) * division.splits
    instantiation = Instantiation("step/latent_attend.cuh", "step_latent_attend", parameters)
    return Prepared(instantiation, grid, 32 * _WARPS, _AttentionArguments(given), shared)


def latent_values(
    out: Tensor,
    lengths: Tensor,
    weights: LatentWeights,
    workspace: LatentWorkspace,
    *,
    capacity: int,
    division: LatentDivision,
) -> Prepared:
    """Add the splits of :func:`latent_attend` and multiply them by each head's values.

    Args:
        out: [M, H * V], written.
        lengths: int32 [M], position of each token.
        weights: parameters and sizes.
        workspace: holds the splits.
        capacity: positions of the cache.
        division: the division that made the splits.

    Raises:
        ValueError: ``out`` has a dtype, shape or alignment that the kernel can't store.
    """
    check_rows(out=out)
    rows, heads = out.shape[0], weights.heads
    if out.shape[1] != heads * weights.value_dim:
        raise ValueError(f"out: expected {heads} heads of {weights.value_dim}, found {list(out.shape)}")
    parameters: Parameters = (
        ("Element", ELEMENTS[out.dtype]),
        ("IN", weights.latent_dim),
        ("OUT", weights.value_dim),
        ("TILE", division.tile),
    )
    given = _Values(
        sums=workspace.sums.data_ptr(),
        totals=workspace.totals.data_ptr(),
        weight=weights.values.data_ptr(),
        out=out.data_ptr(),
        lengths=lengths.data_ptr(),
        out_stride=out.stride(0),
        rows=rows,
        heads=heads,
        splits=division.splits,
        capacity=capacity,
    )
    grid = -(-rows // _ROWS) * heads * (weights.value_dim // _COLUMNS)
    instantiation = Instantiation("step/latent_values.cuh", "step_latent_values", parameters)
    return Prepared(instantiation, grid, _THREADS, _ValuesArguments(given))


def _check_cache(cache: Tensor, queries: Tensor, weights: LatentWeights) -> None:
    rows, heads, width = queries.shape
    if not cache.is_contiguous() or not queries.is_contiguous():
        raise ValueError("cache, queries: expected contiguous tensors")
    if cache.shape[0] not in (1, rows) or cache.shape[2] != width or width != weights.width:
        raise ValueError(f"cache: expected rows of {weights.width} channels, found {list(cache.shape)}")
    if heads != weights.heads:
        raise ValueError(f"queries: expected {weights.heads} heads, found {heads}")
