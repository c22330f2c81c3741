"""Attention of one new token per sequence over its cache: ``cuda/step/attend.cuh``."""

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

# Mirrored in the kernel.
_HEADS, _TILE = 8, 16
_NO_WINDOW = (1 << 31) - 1
_MANY_SPLITS, _MOST_SPLITS = 16, 64
_LARGEST_CLUSTER = 5
_REGISTERS = 65536


class AttentionShape(NamedTuple):
    """What decides how attention is divided among blocks.

    Attributes:
        batch: B.
        heads, kv_heads, head_dim: H, KV and D.
        capacity: L.
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int

    @property
    def units(self) -> int:
        """Sequences times heads of keys and values times chunks of 8 query heads: they divide the work."""
        return self.batch * self.kv_heads * -(-(self.heads // self.kv_heads) // _HEADS)


class Division(NamedTuple):
    """How attention is divided.

    Attributes:
        splits: parts of the positions of each sequence, at most.
        warps: warps of a block, which take tiles of 16 positions in turns.
        meets: splits are a cluster of blocks and are added up in distributed shared memory.
    """

    splits: int
    warps: int = 4
    meets: bool = False

    def shared_bytes(self, head_dim: int, together: int = 1) -> int:
        """Dynamic shared memory of a block; ``together`` rows are of one sequence."""
        # A warp's sums, and what it turns the new tokens' heads in; those heads.
        return self.warps * (_HEADS + 1) * head_dim * 4 + (_HEADS + 2 * together) * head_dim * 2

    def blocks_each(self, head_dim: int) -> int:
        """Blocks that a multiprocessor holds: registers decide."""
        registers = 96 if head_dim <= 64 else 128 if head_dim == 128 else 168 if head_dim < 128 else 255
        return max(1, _REGISTERS // (32 * self.warps * registers))


def divide(shape: AttentionShape, multiprocessors: int, *, clusters: bool = False) -> Division:
    """The division for a GPU, with ``clusters`` for one that has clusters of blocks.

    Sequences are split until their blocks fill all places at once; never shorter than what the warps of a
    block take in one turn. Figures are in docs/kernels.md, "Splits of attention".
    """
    plain = Division(1, warps=8 if shape.units <= multiprocessors else 4)
    places = multiprocessors * plain.blocks_each(shape.head_dim)
    turns = -(-shape.capacity // (_TILE * plain.warps))
    # Where most multiprocessors idle, a second turn costs less than another block that has to be waited for.
    short = turns <= 2
    if short and 4 * shape.units <= multiprocessors:
        return plain
    # The last block of a sequence reads what all leave: more only to occupy every multiprocessor.
    most = min(_MOST_SPLITS, max(_MANY_SPLITS, multiprocessors // shape.units))
    splits = max(1, min(turns, places // shape.units, most))
    # All blocks of a cluster begin at once. Larger ones, or many, wait for each other's places.
    crowded = splits > 2 and 4 * shape.units * splits > 3 * places
    return plain._replace(
        splits=splits, meets=clusters and not short and not crowded and 1 < splits <= _LARGEST_CLUSTER
    )


class Workspace(NamedTuple):
    """Memory through which splits are added up, of any attention that it was made for.

    Attributes:
        partials: float32, uninitialised.
        counters: int32 zeros, which are zero again behind every launch.
    """

    partials: Tensor
    counters: Tensor

    @classmethod
    def of(cls, divided: Iterable[tuple[AttentionShape, Division]], device: torch.device) -> Workspace:
        """Enough for attention of these shapes, so divided, one after another."""
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
        *((name, ctypes.c_void_p) for name in ("keys", "values", "out", "partials", "counters", "lengths")),
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
    workspace: Workspace,
    *,
    scale: float,
    division: Division,
    window: int | None = None,
    softcap: float | None = None,
    together: bool = False,
) -> Prepared:
    """Append a token to every sequence, and its attention over positions 0 to ``lengths[b]``.

    Keys and values of earlier tokens and ``lengths`` may be read while the stream's previous kernels still
    run, if these are launched dependently.

    Args:
        x: [B, (H + 2 * KV) * D], queries, keys and values side by side; with H * D more columns of gates, by
            whose sigmoid the result is multiplied, where ``work`` says so.
        keys, values: [B, KV, L, D], contiguous: the cache; [1, KV, L, D] with ``together``.
        out: [B, H, D], each row contiguous.
        lengths: int32 [B], tokens in the cache; with ``together`` rising by one from row to row.
        work: norms and rotation of queries and keys, done first.
        workspace: made for this shape and division.
        scale: factor on the dot products.
        division: from :func:`divide`.
        window: positions that are seen at most, the token's own included.
        softcap: dot products become ``softcap * tanh(product / softcap)``.
        together: the rows are neighbouring tokens of one sequence, each of which sees those before it; not
            with norms over all heads.

    Raises:
        ValueError: a tensor that the kernel can't load, or norms that it can't combine.
    """
    check_rows(keys=keys, values=values, out=out)
    batch, heads, size = out.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    if not all(tensor.is_contiguous() for tensor in (keys, values, out[0])):
        raise ValueError("keys, values, rows of out: expected contiguous tensors")
    if x.shape[0] != batch or keys.shape[0] != (1 if together else batch):
        raise ValueError(f"x: expected {batch} rows, found {list(x.shape)}")
    shape = AttentionShape(batch, heads, kv_heads, size, capacity)
    group = heads // kv_heads
    # Exponents are of 2 on the GPU.
    log2e = math.log2(math.e)
    arguments = _Arguments(
        given=new_heads(x, heads, keys, work),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out.data_ptr(),
        partials=address(workspace.partials),
        counters=address(workspace.counters),
        lengths=lengths.data_ptr(),
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
        ("GATED", work.gated),
        ("SOFTCAP", softcap is not None),
        *head_parameters(work),
        ("SHARED_BYTES", shared),
    )
    instantiation = Instantiation("step/attend.cuh", "step_attend", parameters)
    return Prepared(instantiation, shape.units * division.splits, 32 * division.warps, arguments, shared)
