"""Marlin-24 layout: 4- and 8-bit codes of 2:4 sparse weights (Sparse-Marlin; docs/formats.md).

    codes   int32 [K/32, N*bits/2]   tiles of 16 kept channels x 64 outputs; 16 * bits words of 32 bits a tile
    mask    int16 [K/32, 2N]         four descriptors of 4 bits a word; their order: _mask_places
    scales  float16 [G, N]           permuted within 64 outputs where there are several groups

Of every four channels 4i .. 4i + 3 two codes are stored, kept channels 2i and 2i + 1, and their places
p0 < p1 as the descriptor p0 | p1 << 2. With R = [0, 1, 8, 9], element j = 0..7 of lane t = 0..31 and part
u = 0..3 of tile (kt, nt) holds

    kept channel 16 kt + 2 (t % 4) + R[j % 4]        n = 64 nt + 8 (t // 4) + 4 (j // 4) + u

Four bits: word 4t + u, slot i holds element [0, 2, 4, 6, 1, 3, 5, 7][i]. Eight bits: words 2 (4t + u) + h,
slot i holds element 4h + [0, 2, 1, 3][i]. Where four channels have fewer than two nonzero codes, codes of
zero are stored, too, in fixed places, so every weight has exactly one encoding.

Writers of compressed-tensors left scales unpermuted where K is two groups. Such a checkpoint can't be
distinguished from one with permuted scales, and is read as the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from marlinq.core.errors import CheckpointError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Element, Scheme
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.core.weight import Grid
from marlinq.formats.layouts.layout import Layout, ModuleSpec, PlainTensors, TensorSpec, g_idx_refusal
from marlinq.formats.layouts.marlin import GRANULARITIES
from marlinq.formats.packing import pack_last, slots_per_word, unpack_last

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

SPAN = TWO_OF_FOUR.span
_TILE_K, _TILE_N = 16, 64
_ROWS = (0, 1, 8, 9)
_SLOTS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3, 4, 6, 5, 7)}
_SCALES = (0, 4, 1, 5, 2, 6, 3, 7)
# Places of the two stored codes. The index is a set of places with nonzero codes, bit p for place p; None for
# sets of three and four places.
_PLACES = (
    (2, 3), (0, 2), (1, 2), (0, 1), (2, 3), (0, 2), (1, 2), None,
    (2, 3), (0, 3), (1, 3), None, (2, 3), None, None, None,
)  # fmt: skip


@dataclass(frozen=True)
class Suffixes:
    """Suffixes of a writer's tensors.

    Attributes:
        codes, mask, scales: suffixes of the three tensors.
        shape: suffix of the int64 shape (N, K), which is read but never written; None where there is none.
    """

    codes: str
    mask: str
    scales: str
    shape: str | None = None


class Marlin24(Layout):
    """Marlin-24 under the names of one writer.

    Args:
        name: name of the layout.
        suffixes: names of its tensors.
    """

    family = "marlin-24"
    mask_key: str
    sparsity = TWO_OF_FOUR
    elements = ("int4", "int8")
    original_kernel = "vLLM's Marlin-24 kernel"

    def __init__(self, name: str, suffixes: Suffixes) -> None:
        self.name = name
        self.key, self.mask_key, self.scale_key = suffixes.codes, suffixes.mask, suffixes.scales
        self.read_only = () if suffixes.shape is None else (suffixes.shape,)
        self.suffixes = (suffixes.codes, suffixes.mask, suffixes.scales, *self.read_only)
        self.plain = PlainTensors(shape=suffixes.shape)

    def as_stored(self, scheme: Scheme) -> Scheme:
        return replace(scheme, zero_point="midpoint")

    def says_all(self, spec: ModuleSpec) -> bool:
        return True

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        if scheme.stores_zeros:
            return f"asymmetric weights; {self.name} stores no zero points"
        if scheme.sparsity != TWO_OF_FOUR:
            return f"dense weights; {self.name} holds {TWO_OF_FOUR.describe()} ones only"
        return super().scheme_refusal(scheme)

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        if (reason := self.scheme_refusal(self.as_stored(spec.scheme))) is not None:
            return reason
        k, n = spec.shape
        if k % (2 * _TILE_K) or n % _TILE_N:
            return f"K={k} must be a multiple of {2 * _TILE_K} and N={n} of {_TILE_N} (one tile)"
        if spec.granularity not in GRANULARITIES:
            return f"group size {spec.granularity.size} is not one of 32, 64, 128, -1"
        if not spec.granularity.divides(k):
            return f"K={k} is not a multiple of the group size {spec.channels_per_group}"
        return None

    def strict_refusal(self, spec: ModuleSpec) -> str | None:
        """Why vLLM's kernel (K%128, N%128, group 128 or -1) can't run this module, or None."""
        if (reason := self.shape_refusal(spec)) is not None:
            return reason
        if spec.in_features % 128 or spec.out_features % 128:
            return (
                f"{self.original_kernel} needs K={spec.in_features} and N={spec.out_features} to be "
                "multiples of 128"
            )
        if spec.granularity not in (Granularity.group(128), Granularity.channel()):
            return f"{self.original_kernel} takes group sizes 128 and -1, not {spec.granularity.size}"
        return None

    def value_refusal(self, grid: Grid) -> str | None:
        if grid.scheme.stores_zeros:
            count = int((grid.zeros != grid.element.midpoint).sum())
            return f"asymmetric: {count} of {grid.zeros.numel()} zero points differ from the midpoint"
        return g_idx_refusal(grid)

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        k, n = spec.shape
        rows, bits = k // (2 * _TILE_K), spec.scheme.element.bits
        tensors = {
            self.key: TensorSpec("int32", (rows, n * bits // 2)),
            self.mask_key: TensorSpec("int16", (rows, 2 * n)),
            self.scale_key: TensorSpec(spec.scheme.scale_dtype, (spec.groups, n)),
        }
        return tensors | {suffix: TensorSpec("int64", (2,)) for suffix in spec.extras}

    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], element: Element) -> tuple[int, int]:
        rows, columns = shapes[self.key]
        return rows * 2 * _TILE_K, columns * 2 // element.bits

    def pack_codes(self, codes: Tensor, spec: ModuleSpec) -> Tensor:
        bits = spec.scheme.element.bits
        kept = kept_codes(codes, spec.scheme.element.midpoint)
        k, n = kept.shape
        tiles = kept.reshape(k // _TILE_K, _TILE_K, n // _TILE_N, _TILE_N).transpose(1, 2).flatten(2)
        ordered = tiles[:, :, _tile_order(bits).to(codes.device)]
        return pack_last(ordered.reshape(k // _TILE_K, -1, slots_per_word(bits)), bits)

    def pack_mask(self, codes: Tensor, spec: ModuleSpec) -> Tensor:
        stored_places = places(codes, spec.scheme.element.midpoint)
        # Four descriptors a word: int16 [K/16, N].
        four = (stored_places[:, 0] | stored_places[:, 1] << 2).to(torch.int32).reshape(-1, 4, codes.shape[1])
        words = four[:, 0] | four[:, 1] << 4 | four[:, 2] << 8 | four[:, 3] << 12
        signed = words - ((words >= 1 << 15).to(torch.int32) << 16)
        stored = torch.empty(codes.numel() // 16, dtype=torch.int16, device=codes.device)
        stored[_mask_places(len(words), codes.shape[1], codes.device)] = signed.to(torch.int16).flatten()
        return stored.reshape(codes.shape[0] // 32, -1)

    def unpack_codes(self, stored: Tensor, spec: ModuleSpec, mask: Tensor | None = None) -> Tensor:
        """The codes, uint8 [K, N]; ``mask``: the tensor of :meth:`pack_mask`.

        Raises:
            CheckpointError: the two places of a descriptor don't ascend.
        """
        assert mask is not None, "a sparse layout's codes come with their mask"
        (k, n), bits = spec.shape, spec.scheme.element.bits
        ordered = unpack_last(stored, bits).reshape(k // 32, n // _TILE_N, -1)
        tiles = torch.empty_like(ordered)
        tiles[:, :, _tile_order(bits).to(stored.device)] = ordered
        kept = tiles.reshape(k // 32, n // _TILE_N, _TILE_K, _TILE_N).transpose(1, 2).reshape(k // SPAN, 2, n)
        words = mask.flatten()[_mask_places(k // 16, n, mask.device)].reshape(k // 16, n).to(torch.int32)
        descriptors = torch.stack([words >> 4 * part & 15 for part in range(4)], dim=1).reshape(k // SPAN, n)
        first, second = descriptors & 3, descriptors >> 2
        wrong = first >= second
        if bool(wrong.any()):
            row, column = divmod(int(wrong.flatten().to(torch.uint8).argmax()), n)
            raise CheckpointError(
                f"{self.mask_key}: {int(wrong.sum())} of {wrong.numel()} descriptors do not name two "
                f"ascending places, first {int(first[row, column])} and {int(second[row, column])} at input "
                f"channel {SPAN * row} of output channel {column}; the mask is damaged"
            )
        codes = torch.full(
            (k // SPAN, SPAN, n), spec.scheme.element.midpoint, dtype=torch.uint8, device=stored.device
        )
        return codes.scatter_(1, torch.stack((first, second), dim=1).long(), kept).reshape(k, n)

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        return {self.scale_key: _permuted(grid.scales, _SCALES)}

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        for suffix in spec.extras:
            shape = tensors[suffix].tolist()
            if shape != [spec.out_features, spec.in_features]:
                raise CheckpointError(
                    f"{suffix}: expected [{spec.out_features}, {spec.in_features}] from {self.key}, "
                    f"found {shape}"
                )
        back = tuple(_SCALES.index(t) for t in range(8))
        return Grid.of(spec.scheme, spec.shape, scales=_permuted(tensors[self.scale_key], back))


COMPRESSED_24 = Marlin24("marlin-24", Suffixes("weight_packed", "meta", "scale_packed", shape="weight_shape"))
"""Marlin-24 with the names of compressed-tensors."""

GPTQ_24 = Marlin24("gptq-marlin-24", Suffixes("B_24", "B_meta", "s"))
"""Marlin-24 with the names of Sparse-Marlin and AutoGPTQ."""


def _permuted(scales: Tensor, order: tuple[int, ...]) -> Tensor:
    """Scales [G, N] with columns reordered within every eight; unchanged where G is 1."""
    if len(scales) == 1:
        return scales.contiguous()
    return scales.reshape(len(scales), -1, 8)[:, :, list(order)].reshape(scales.shape)


def places(codes: Tensor, zero: int) -> Tensor:
    """uint8 [K / 4, 2, N]: places 0 .. 3 of the two stored codes in every span of four, of ``codes`` uint8
    [K, N]."""
    used = (codes != zero).to(torch.int32).reshape(-1, SPAN, codes.shape[1])
    which = used[:, 0] | used[:, 1] << 1 | used[:, 2] << 2 | used[:, 3] << 3
    table = torch.tensor([places or (0, 0) for places in _PLACES], dtype=torch.uint8, device=codes.device)
    return table[which].movedim(2, 1)


def kept_codes(codes: Tensor, zero: int) -> Tensor:
    """uint8 [K / 2, N]: the stored codes."""
    spans = codes.reshape(-1, SPAN, codes.shape[1])
    return spans.gather(1, places(codes, zero).long()).reshape(-1, codes.shape[1])


@lru_cache(maxsize=2)
def _tile_order(bits: int) -> Tensor:
    """int64 [1024]: for every slot of a tile's words the index 64 * kept channel + output of its code."""
    places = []
    for lane in range(32):
        for part in range(4):
            for slot in range(8):
                j = _SLOTS[bits][slot]
                kept = 2 * (lane % 4) + _ROWS[j % 4]
                places.append(_TILE_N * kept + 8 * (lane // 4) + 4 * (j // 4) + part)
    return torch.tensor(places)


def _mask_places(words: int, n: int, device: torch.device) -> Tensor:
    """int64 [words * N]: at index m * N + r the place of the mask word of channels 16m .. 16m + 15, output
    r."""
    m = torch.arange(words, device=device).unsqueeze(1)
    r = torch.arange(n, device=device).unsqueeze(0)
    row = 64 * (r // 64) + 2 * (r % 2) + r % 8 // 4 + 32 * (r % 4 // 2) + 4 * (r % 64 // 8)
    # Within each 2 x 2 block of rows and words the two off the diagonal change places.
    up = (row % 2 == 0) & (m % 2 == 1)
    down = (row % 2 == 1) & (m % 2 == 0)
    swap = up.to(torch.int64) - down.to(torch.int64)
    row, m = row + swap, m - swap
    return (m // 2 * 2 * n + 2 * row + m % 2).flatten()
