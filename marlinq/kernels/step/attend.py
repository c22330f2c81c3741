"""Attention of one new token per sequence over its cache: ``cuda/step/attend.cuh``."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.kernels.jit.instantiation import Instantiation
from marlinq.kernels.step.prepared import ELEMENTS, Prepared, address, check_rows

# Mirrored in the kernel.
_HEADS, _TILE = 8, 16
_NO_WINDOW = (1 << 31) - 1
_MOST_SPLITS = 64
# Beyond, registers would not hold the next tile beside this one's sums.
_AHEAD_CHANNELS = 128


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
        splits: parts of the positions of each sequence.
        ahead: whether blocks are larger, and their warps load the next tile while they multiply one: worth
            the registers where too few blocks run to hide each other's waits.
        early: whether earlier tokens are loaded before the previous kernel has ended. That kernel is then
            :func:`marlinq.kernels.step.append.append` with ``hold``.
    """

    splits: int
    ahead: bool = False
    early: bool = False

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return 8 if self.ahead else 4

    def blocks_each(self, head_dim: int) -> int:
        """Blocks that a multiprocessor holds: registers decide."""
        if self.ahead:
            return 2 if head_dim <= 64 else 1
        return 6 if head_dim <= 64 else 4 if head_dim <= 128 else 2


def divide(shape: AttentionShape, multiprocessors: int) -> Division:
    """The division for a GPU.

    A few sequences are split so that every multiprocessor has a block, many until their blocks fill all
    places at once; never shorter than what the warps of a block take in one turn.
    """
    few = shape.units < multiprocessors // 2
    ahead = few and shape.head_dim <= _AHEAD_CHANNELS
    plain = Division(1, ahead, early=ahead)
    turns = -(-shape.capacity // (_TILE * plain.warps))
    places = multiprocessors * (1 if few else plain.blocks_each(shape.head_dim))
    return plain._replace(splits=max(1, min(turns, places // shape.units, _MOST_SPLITS)))


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
        *(
            (name, ctypes.c_void_p)
            for name in ("q", "keys", "values", "out", "partials", "counters", "lengths")
        ),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "chunks", "splits", "capacity", "window")),
        ("out_stride", ctypes.c_longlong),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    lengths: Tensor,
    workspace: Workspace,
    *,
    scale: float,
    division: Division,
    window: int | None = None,
    softcap: float | None = None,
) -> Prepared:
    """Attention of token ``lengths[b]`` of every sequence over positions 0 to ``lengths[b]``.

    Args:
        q: [B, H, D], contiguous.
        keys, values: [B, KV, L, D], contiguous.
        out: [B, H, D], each row contiguous.
        lengths: int32 [B].
        workspace: made for this shape and division.
        scale: factor on the dot products.
        division: from :func:`divide`.
        window: positions that are seen at most, the token's own included.
        softcap: dot products become ``softcap * tanh(product / softcap)``.

    Raises:
        ValueError: a tensor that the kernel can't load.
    """
    check_rows(q=q, keys=keys, values=values, out=out)
    batch, heads, size = q.shape
    kv_heads, capacity = keys.shape[1], keys.shape[2]
    if not all(tensor.is_contiguous() for tensor in (q, keys, values, out[0])):
        raise ValueError("q, keys, values, rows of out: expected contiguous tensors")
    shape = AttentionShape(batch, heads, kv_heads, size, capacity)
    group = heads // kv_heads
    # Exponents are of 2 on the GPU.
    log2e = math.log2(math.e)
    arguments = _Arguments(
        q=q.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        out=out.data_ptr(),
        partials=address(workspace.partials),
        counters=address(workspace.counters),
        lengths=lengths.data_ptr(),
        kv_heads=kv_heads,
        group=group,
        chunks=-(-group // _HEADS),
        splits=division.splits,
        capacity=capacity,
        window=_NO_WINDOW if window is None else window,
        out_stride=out.stride(0),
        scale=scale * log2e if softcap is None else scale / softcap,
        softcap=0.0 if softcap is None else softcap * log2e,
    )
    parameters = (
        ("Element", ELEMENTS[q.dtype]),
        ("D", size),
        ("WARPS", division.warps),
        ("MIN_BLOCKS", division.blocks_each(size)),
        ("AHEAD", division.ahead),
        ("EARLY", division.early),
        ("SOFTCAP", softcap is not None),
    )
    instantiation = Instantiation("step/attend.cuh", "step_attend", parameters)
    return Prepared(instantiation, shape.units * division.splits, 32 * division.warps, arguments)
