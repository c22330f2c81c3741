"""Attention of one new token per sequence over its cache (``cuda/step/attend.cuh``)."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation, Parameters
from marlinq.kernels.launch.prepared import ELEMENTS, Prepared, address, check_rows
from marlinq.kernels.step.heads import HeadWork, NewHeads, head_parameters, new_heads

# Query heads and positions of a tile; equal constants are in the kernel.
_HEADS, _TILE = 8, 16
MOST_CHANNELS = 512
"""Channels of a head at most."""
# Channels of a head up to which a block may have eight warps: small GPUs lack shared memory for sums of more.
_EIGHT_WARPS = 256
_NO_WINDOW = (1 << 31) - 1
# Splits of a sequence at most; and where only more of them fill the GPU.
_MANY_SPLITS, _MOST_SPLITS = 16, 64
# Blocks of a cluster at most.
_LARGEST_CLUSTER = 5
_REGISTERS = 65536


class AttentionShape(NamedTuple):
    """Sizes of an attention layer and its cache.

    Attributes:
        batch: sequences B.
        heads: query heads H.
        kv_heads: heads KV of keys and values.
        head_dim: channels D of a head.
        capacity: positions L of the cache.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int

    @property
    def units(self) -> int:
        """Pieces of work: sequences x heads of keys and values x chunks of up to 8 query heads of each."""
        return self.batch * self.kv_heads * -(-(self.heads // self.kv_heads) // _HEADS)


class Division(NamedTuple):
    """How attention is divided among blocks and warps.

    Attributes:
        splits: parts, at most, that the positions of each sequence are split into; each is a block's.
        warps: warps of a block, which take tiles of 16 positions in turns.
        meets: whether the splits are one cluster of blocks and are added in distributed shared memory; else
            through global memory.
    """

    splits: int
    warps: int = 4
    meets: bool = False

    def shared_bytes(self, head_dim: int, together: int = 1) -> int:
        """Bytes of dynamic shared memory of a block; ``together``: rows that belong to one sequence."""
        # Each warp's sums and the space in which it rotates heads; then the heads of the new tokens.
        return self.warps * (_HEADS + 1) * head_dim * 4 + (_HEADS + 2 * together) * head_dim * 2

    def blocks_each(self, head_dim: int) -> int:
        """Blocks that fit on a multiprocessor, by registers."""
        registers = 96 if head_dim <= 64 else 128 if head_dim == 128 else 168 if head_dim < 128 else 255
        return max(1, _REGISTERS // (32 * self.warps * registers))


def divide(shape: AttentionShape, multiprocessors: int, *, clusters: bool = False) -> Division:
    """The division for a GPU; ``clusters``: whether it has clusters of blocks.

    Sequences are split until their blocks fill the GPU, but into parts of no fewer positions than the warps
    of a block take in one turn. Figures are in docs/kernels.md, "Splits of attention".
    """
    few = shape.units <= multiprocessors and shape.head_dim <= _EIGHT_WARPS
    plain = Division(1, warps=8 if few else 4)
    places = multiprocessors * plain.blocks_each(shape.head_dim)
    turns = -(-shape.capacity // (_TILE * plain.warps))
    # Where most multiprocessors idle, a second turn of the warps costs less than waiting for another block.
    short = turns <= 2
    if short and 4 * shape.units <= multiprocessors:
        return plain
    # The last block of a sequence adds the sums of all splits, so more than 16 only to fill all
    # multiprocessors.
    most = min(_MOST_SPLITS, max(_MANY_SPLITS, multiprocessors // shape.units))
    splits = max(1, min(turns, places // shape.units, most))
    # A cluster starts only when there is room for all its blocks; large clusters, or many, would wait.
    crowded = splits > 2 and 4 * shape.units * splits > 3 * places
    return plain._replace(
        splits=splits, meets=clusters and not short and not crowded and 1 < splits <= _LARGEST_CLUSTER
    )


class AttentionWorkspace(NamedTuple):
    """Memory through which splits are added, shared by attention layers that run one after another.

    Attributes:
        partials: sums of the splits, float32, uninitialised.
        counters: int32, zero before a launch; the launch leaves them zero.
    """

    partials: Tensor
    counters: Tensor

    @classmethod
    def of(
        cls, divided: Iterable[tuple[AttentionShape, Division]], device: torch.device
    ) -> AttentionWorkspace:
        """Memory that suffices for each of these shapes and divisions."""
        shapes = list(divided)
        floats = max(
            (shape.units * division.splits * _HEADS * (shape.head_dim + 2) for shape, division in shapes),
            default=0,
        )
        units = max((shape.units for shape, _ in shapes), default=0)
        return cls(
            torch.empty(floats, dtype=torch.float32, device=device),
            torch.zeros(units, dtype=torch.int32, device=device),
        )


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("given", NewHeads),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "out", "partials", "counters")),
        *((name, ctypes.c_void_p) for name in ("lengths", "sinks")),
        *((name, ctypes.c_int) for name in ("group", "chunks", "splits", "capacity", "window")),
        ("out_stride", ctypes.c_longlong),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


def attend(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lengths: Tensor,
    work: HeadWork,
    workspace: AttentionWorkspace,
    *,
    scale: float,
    division: Division,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    together: bool = False,
) -> Prepared:
    """Append a token to every sequence, and compute its attention over positions 0 to ``lengths[b]``.

    If launched dependently, the kernel may read ``lengths``, and keys and values of earlier tokens, while the
    stream's previous kernels still run.

    Args:
        x: [B, (H + 2 * KV) * D], queries, keys and values side by side, as far as ``work`` has them, with
            gates in the place that ``work.gates`` says; their sigmoid or softplus multiplies the result.
        keys, values: [B, KV, L, D], contiguous; the cache. [1, KV, L, D] with ``together``.
        out: [B, H, D], each row contiguous; written.
        lengths: int32 [B], tokens in the cache; with ``together`` rising by one from row to row.
        work: norms and rotation of queries, keys and values, applied first. Where it is ``shared``, nothing
            is appended: ``keys`` and ``values`` hold the new token's already.
        workspace: made for this shape and division.
        scale: factor on the dot products.
        division: from :func:`divide`.
        window: positions that a token sees at most, its own included; None for all.
        softcap: dot products become ``softcap * tanh(product / softcap)``; None for uncapped ones.
        sinks: float32 [H], or None; ``exp(sinks[h])`` is added to the sum that head h's softmax divides by.
        together: whether the rows are neighbouring tokens of one sequence, each of which sees the rows before
            it; not with norms over all heads.

    Raises:
        ValueError: a tensor has a shape, dtype or alignment that the kernel can't load, or norms are of kinds
            that it can't combine.
    """
    check_rows(keys=keys, values=values, out=out)
    batch, heads, size = out.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    if not all(tensor.is_contiguous() for tensor in (keys, values, out[0])):
        raise ValueError("keys, values, rows of out: expected contiguous tensors")
    if x.shape[0] != batch or keys.shape[0] != (1 if together else batch):
        raise ValueError(f"x: expected {batch} rows, found {list(x.shape)}")
    if sinks is not None and (sinks.shape != (heads,) or sinks.dtype != torch.float32):
        raise ValueError(f"sinks: expected float32 {[heads]}, found {sinks.dtype} {list(sinks.shape)}")
    shape = AttentionShape(batch, heads, kv_heads, size, capacity)
    group = heads // kv_heads
    # The kernel computes powers of 2 instead of e.
    log2e = math.log2(math.e)
    arguments = _Arguments(
        given=new_heads(x, heads, keys, work),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out.data_ptr(),
        partials=address(workspace.partials),
        counters=address(workspace.counters),
        lengths=lengths.data_ptr(),
        sinks=address(sinks),
        group=group,
        chunks=-(-group // _HEADS),
        splits=division.splits,
        capacity=capacity,
        window=_NO_WINDOW if window is None else window,
        out_stride=out.stride(0),
        scale=scale * log2e if softcap is None else scale / softcap,
        softcap=0.0 if softcap is None else softcap * log2e,
    )
    rows = batch if together else 1
    shared = division.shared_bytes(size, rows)
    parameters: Parameters = (
        ("Element", ELEMENTS[x.dtype]),
        ("D", size),
        ("WARPS", division.warps),
        ("MIN_BLOCKS", division.blocks_each(size)),
        ("CLUSTER", division.splits if division.meets else 1),
        ("TOGETHER", rows),
        ("GATES", f"Gates::{work.gates.upper()}"),
        ("SOFTPLUS", work.softplus),
        ("SINKS", sinks is not None),
        ("SOFTCAP", softcap is not None),
        *head_parameters(work),
        ("SHARED_BYTES", shared),
    )
    instantiation = Instantiation("step/attend.cuh", "step_attend", parameters)
    return Prepared(instantiation, shape.units * division.splits, 32 * division.warps, arguments, shared)
