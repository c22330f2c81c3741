"""Marlin layout (IST-DASLab Marlin; docs/formats.md).

    B int32 [K/16, 2N]   tiles of 16 (K) x 64 (N); 128 words a tile, word 4t + q for lane t = 0..31, q = 0..3
    s float16 [G, N]     permuted so that the scales of a lane are adjacent

Slot i of word (t, q) of tile (kt, nt), with j = [0, 2, 4, 6, 1, 3, 5, 7][i] and R = [0, 1, 8, 9], holds

    k = 16 kt + 2 (t % 4) + R[j % 4]        n = 64 nt + 16 q + t // 4 + 8 (j // 4)

which is the register fragment of one lane for a 16x16 block of mma.m16n8k16. Codes are offset binary with
zero 8; zero points and g_idx can't be stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Element, Scheme
from marlinq.core.weight import Grid
from marlinq.formats.layouts.layout import ModuleSpec, PlainTensors, TensorSpec, g_idx_refusal
from marlinq.formats.layouts.words import WordLayout
from marlinq.formats.packing import pack_rows, transpose_fields, unpack_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

GRANULARITIES = (*map(Granularity.group, (32, 64, 128)), Granularity.channel())
GROUP_SIZES = tuple(granularity.group_size for granularity in GRANULARITIES)
TILE_K = 16
TILE_N = 64

_LOW = 0x0F0F0F0F
# Rows of words unpacked at a time. On a GPU every slab costs launches, so slabs are larger.
_SLAB_ROWS = {"cpu": 256, "cuda": 2048}


class Marlin(WordLayout):
    """Marlin as serialised by its authors and by AutoGPTQ (``checkpoint_format: marlin``)."""

    name = "marlin"
    family = "marlin"
    key = "B"
    scale_key = "s"
    original_kernel = "the original Marlin kernel"
    suffixes = ("B", "s")
    plain = PlainTensors()
    elements = ("int4",)

    def as_stored(self, scheme: Scheme) -> Scheme:
        return replace(scheme, zero_point="midpoint")

    def says_all(self, spec: ModuleSpec) -> bool:
        return True

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        if scheme.stores_zeros:
            return "asymmetric weights; Marlin stores no zero points"
        return super().scheme_refusal(scheme)

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        if (reason := super().scheme_refusal(spec.scheme)) is not None:
            return reason
        if spec.in_features % TILE_K or spec.out_features % TILE_N:
            return (
                f"K={spec.in_features} must be a multiple of {TILE_K} "
                f"and N={spec.out_features} of {TILE_N} (one tile)"
            )
        if spec.granularity not in GRANULARITIES:
            return f"group size {spec.granularity.size} is not one of 32, 64, 128, -1"
        if not spec.granularity.divides(spec.in_features):
            return f"K={spec.in_features} is not a multiple of the group size {spec.channels_per_group}"
        return None

    def strict_refusal(self, spec: ModuleSpec) -> str | None:
        """Why the original kernel (K%128, N%256, group 128 or -1) can't run this module, or None."""
        reason = self.shape_refusal(spec)
        if reason is not None:
            return reason
        if spec.in_features % 128 or spec.out_features % 256:
            return (
                f"{self.original_kernel} needs K={spec.in_features} to be a multiple of 128 "
                f"and N={spec.out_features} of 256"
            )
        if spec.granularity not in (Granularity.group(128), Granularity.channel()):
            return f"{self.original_kernel} takes group sizes 128 and -1, not {spec.granularity.size}"
        return None

    def value_refusal(self, grid: Grid) -> str | None:
        if grid.scheme.stores_zeros:
            middle = grid.element.midpoint
            count = int((grid.zeros != middle).sum())
            return (
                f"asymmetric: {count} of {grid.zeros.numel()} zero points differ from {middle}; "
                "Marlin stores none"
            )
        return g_idx_refusal(grid)

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        k, n = spec.in_features, spec.out_features
        return {
            "B": TensorSpec("int32", (k // TILE_K, 2 * n)),
            "s": TensorSpec(spec.scheme.scale_dtype, (spec.groups, n)),
        }

    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], element: Element) -> tuple[int, int]:
        rows, columns = shapes["B"]
        return rows * TILE_K, columns // 2

    def from_natural(self, natural: Tensor) -> Tensor:
        return tile_words(natural)

    def to_natural(self, stored: Tensor) -> Tensor:
        return untile_words(stored)

    def channels(self, stored: Tensor, start: int, stop: int, element: Element) -> Tensor:
        return stored[start // TILE_K : stop // TILE_K]

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        return {"s": permute_scales(grid.scales)}

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        return Grid.of(spec.scheme, spec.shape, scales=permute_scales(tensors["s"]))


def pack_tiles(codes: Tensor) -> Tensor:
    """uint8 codes [K, N] to Marlin words int32 [K/16, 2N]; K % 16 == 0, N % 64 == 0."""
    slabs = torch.split(codes, _SLAB_ROWS["cuda" if codes.is_cuda else "cpu"])
    return torch.cat([tile_words(pack_rows(slab, 4)) for slab in slabs])


def unpack_tiles(words: Tensor) -> Tensor:
    """Marlin words int32 [K/16, 2N] to uint8 codes [K, N]; the inverse of :func:`pack_tiles`."""
    slabs = torch.split(words, _SLAB_ROWS["cuda" if words.is_cuda else "cpu"] // TILE_K)
    return torch.cat([unpack_rows(untile_words(slab), 4) for slab in slabs])


def tile_words(natural: Tensor) -> Tensor:
    """Natural words int32 [K/8, N] to Marlin words [K/16, 2N]; K % 16 == 0, N % 64 == 0.

    A Marlin word of lane t takes byte t % 4, the codes of k = 2 (t % 4) and k + 1, from four natural words:
    those of the tile's rows k < 8 and k >= 8 (slots j and j + 2), in columns n and n + 8 (slots j and j + 4).
    """
    upper, lower = natural[0::2], natural[1::2]
    rows, columns = upper.shape
    # Separate low and high nibbles: j = 0, 2 go to the low byte of a half word, and j = 1, 3 to its high
    # byte.
    even = (upper & _LOW) | ((lower & _LOW) << 4)
    odd = ((upper >> 4) & _LOW) | (lower & ~_LOW)
    # [parity, kt, nt, q, n + 8, t // 4] to the four words of a byte transpose, then to [kt, nt, t, q].
    words = torch.stack((even, odd)).reshape(2, rows, columns // 64, 4, 2, 8).permute(0, 4, 1, 2, 5, 3)
    lanes = transpose_fields(words.reshape(4, -1)).reshape(4, rows, columns // 64, 8, 4)
    return lanes.permute(1, 2, 3, 0, 4).reshape(rows, columns * 2)


def untile_words(stored: Tensor) -> Tensor:
    """Marlin words int32 [K/16, 2N] to natural words [K/8, N]; the inverse of :func:`tile_words`."""
    rows, columns = stored.shape[0], stored.shape[1] // 2
    lanes = stored.reshape(rows, columns // 64, 8, 4, 4).permute(3, 0, 1, 2, 4)
    words = transpose_fields(lanes.reshape(4, -1)).reshape(2, 2, rows, columns // 64, 8, 4)
    even, odd = words.permute(0, 2, 3, 5, 1, 4).reshape(2, rows, columns)
    natural = torch.empty(rows * 2, columns, dtype=torch.int32, device=stored.device)
    natural[0::2] = (even & _LOW) | ((odd & _LOW) << 4)
    natural[1::2] = ((even >> 4) & _LOW) | (odd & ~_LOW)
    return natural


def permute_scales(scales: Tensor) -> Tensor:
    """[G, N] from channel order to the stored order, or back: the permutation is its own inverse.

    With several groups, every 64 columns are seen as [8, 8] and transposed. With one group, every 32 columns
    are seen as [4, 4, 2] and their first two axes are exchanged.
    """
    groups, n = scales.shape
    block = (groups, n // 64, 8, 8, 1) if groups > 1 else (groups, n // 32, 4, 4, 2)
    return scales.reshape(block).transpose(2, 3).reshape(groups, n).contiguous()
