"""GPTQ layout, v1 and v2 (AutoGPTQ, GPTQModel; docs/formats.md).

    qweight int32 [K*bits/32, N]   slot i of word r = codes[r*slots + i, n]
    qzeros  int32 [G, N*bits/32]   slot i of word c = zero of column c*slots + i; v1 stores zero - 1
    scales  float16 [G, N]
    g_idx   int32 [K]

v1 zeros: some writers subtract 1 from each slot; GPTQModel subtracts a constant from the whole word, where a
zero of 0 borrows from its neighbour. Both give the same bits if every zero is at least 1, and then no slot is
all ones. A slot of all ones means that a zero of 0 (or 2**bits) was written. It can be decoded only if the
writer is known to subtract from whole words; otherwise it is refused as ambiguous.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from marlinq.core.errors import ConversionRefused
from marlinq.core.scheme import Element, Scheme
from marlinq.core.weight import Grid
from marlinq.formats.layouts.layout import ModuleSpec, PlainTensors, TensorSpec, zero_range_refusal
from marlinq.formats.layouts.words import WordLayout
from marlinq.formats.packing import pack_columns, slots_per_word, unpack_columns

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

WORD_ADD_WRITER = "gptqmodel"
"""``ModuleSpec.zero_writer`` of checkpoints whose v1 zeros were made by whole-word subtraction."""


class GPTQ(WordLayout):
    """GPTQ v1 or v2, which differ only in the stored zero points."""

    family = "gptq"
    key = "qweight"
    scale_key = "scales"
    suffixes = ("qweight", "qzeros", "scales", "g_idx")
    elements = ("int4", "int8")
    stores_order = True

    def __init__(self, version: int) -> None:
        self.version = version
        self.name = "gptq" if version == 1 else "gptq-v2"
        self.plain = PlainTensors(zeros="qzeros", less=1 if version == 1 else 0, order="g_idx")

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        if (reason := self.scheme_refusal(spec.scheme)) is not None:
            return reason
        bits = spec.scheme.element.bits
        slots = slots_per_word(bits)
        if spec.in_features % slots or spec.out_features % slots:
            return (
                f"K={spec.in_features} and N={spec.out_features} must be multiples of {slots} "
                f"({bits}-bit codes in one word)"
            )
        return None

    def value_refusal(self, grid: Grid) -> str | None:
        return zero_range_refusal(grid, lowest=1 if self.version == 1 else 0)

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        k, n = spec.in_features, spec.out_features
        slots = slots_per_word(spec.scheme.element.bits)
        return {
            "qweight": TensorSpec("int32", (k // slots, n)),
            "qzeros": TensorSpec("int32", (spec.groups, n // slots)),
            "scales": TensorSpec(spec.scheme.scale_dtype, (spec.groups, n)),
            "g_idx": TensorSpec("int32", (k,)),
        }

    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], element: Element) -> tuple[int, int]:
        rows, columns = shapes["qweight"]
        return rows * slots_per_word(element.bits), columns

    def from_natural(self, natural: Tensor) -> Tensor:
        return natural

    def to_natural(self, stored: Tensor) -> Tensor:
        return stored

    def channels(self, stored: Tensor, start: int, stop: int, element: Element) -> Tensor:
        slots = slots_per_word(element.bits)
        return stored[start // slots : stop // slots]

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        stored = grid.zeros - 1 if self.version == 1 else grid.zeros
        return {
            "qzeros": pack_columns(stored, grid.element.bits),
            "scales": grid.scales.contiguous(),
            "g_idx": grid.g_idx.contiguous(),
        }

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        zeros = unpack_columns(tensors["qzeros"], spec.scheme.element.bits)
        if self.version == 1:
            zeros = _decode_v1_zeros(tensors["qzeros"], zeros, spec)
        return Grid.of(spec.scheme, spec.shape, scales=tensors["scales"], zeros=zeros, g_idx=tensors["g_idx"])


def _decode_v1_zeros(words: Tensor, slots: Tensor, spec: ModuleSpec) -> Tensor:
    bits = spec.scheme.element.bits
    all_ones = (1 << bits) - 1
    if not bool((slots == all_ones).any()):
        return slots + 1
    if spec.zero_writer != WORD_ADD_WRITER:
        raise ConversionRefused(
            f"qzeros: GPTQ v1 zeros hold the value {all_ones}, which different writers use for different "
            "zero points, and the config does not name GPTQModel as the writer; "
            "requantise or use a v2 checkpoint"
        )
    ones = 0x11111111 if bits == 4 else 0x01010101
    wide = (words.to(torch.int64) + ones) & 0xFFFFFFFF
    wide = torch.where(wide >= 1 << 31, wide - (1 << 32), wide)
    return unpack_columns(wide.to(torch.int32), bits)
