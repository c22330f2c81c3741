"""AWQ GEMM layout (AutoAWQ ``version: gemm``; docs/formats.md).

    qweight int32 [K, N/8]   slot i of word c = codes[k, 8c + ORDER[i]], ORDER = 0 2 4 6 1 3 5 7
    qzeros  int32 [G, N/8]   the same interleave; stores the zero point itself
    scales  float16 [G, N]

4-bit only and without g_idx. A symmetric weight is stored with all zero points 8 and ``zero_point: true``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from marlinq.core.scheme import Element, Scheme
from marlinq.core.weight import Grid
from marlinq.formats.layouts.layout import (
    ModuleSpec,
    PlainTensors,
    TensorSpec,
    g_idx_refusal,
    zero_range_refusal,
)
from marlinq.formats.layouts.words import WordLayout
from marlinq.formats.packing import pack_last, transpose_fields, unpack_last

if TYPE_CHECKING:
    from torch import Tensor

_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
_INVERSE = [0, 4, 1, 5, 2, 6, 3, 7]


class AWQ(WordLayout):
    """AWQ GEMM."""

    name = "awq"
    family = "awq"
    key = "qweight"
    scale_key = "scales"
    suffixes = ("qweight", "qzeros", "scales")
    plain = PlainTensors(zeros="qzeros")
    elements = ("int4",)

    def as_stored(self, scheme: Scheme) -> Scheme:
        return replace(scheme, zero_point="stored")

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        if (reason := self.scheme_refusal(spec.scheme)) is not None:
            return reason
        if spec.in_features % 8 or spec.out_features % 8:
            return (
                f"K={spec.in_features} and N={spec.out_features} must be multiples of 8 (codes in one word)"
            )
        if spec.in_features % spec.channels_per_group:
            return f"K={spec.in_features} is not a multiple of the group size {spec.channels_per_group}"
        return None

    def value_refusal(self, grid: Grid) -> str | None:
        return g_idx_refusal(grid) or zero_range_refusal(grid, lowest=0)

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        k, n, groups = spec.in_features, spec.out_features, spec.groups
        return {
            "qweight": TensorSpec("int32", (k, n // 8)),
            "qzeros": TensorSpec("int32", (groups, n // 8)),
            "scales": TensorSpec(spec.scheme.scale_dtype, (groups, n)),
        }

    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], element: Element) -> tuple[int, int]:
        rows, columns = shapes["qweight"]
        return rows, columns * 8

    def from_natural(self, natural: Tensor) -> Tensor:
        # Eight natural words of neighbouring columns hold 8 (K) x 8 (N) codes; AWQ packs along N instead of
        # K.
        rows, columns = natural.shape[0], natural.shape[1] // 8
        words = natural.reshape(rows, columns, 8).permute(2, 0, 1)[_ORDER].reshape(8, -1)
        return transpose_fields(words).reshape(8, rows, columns).transpose(0, 1).reshape(rows * 8, columns)

    def to_natural(self, stored: Tensor) -> Tensor:
        rows, columns = stored.shape[0] // 8, stored.shape[1]
        words = transpose_fields(stored.reshape(rows, 8, columns).transpose(0, 1).reshape(8, -1))
        return words.reshape(8, rows, columns)[_INVERSE].permute(1, 2, 0).reshape(rows, columns * 8)

    def channels(self, stored: Tensor, start: int, stop: int, element: Element) -> Tensor:
        return stored[start:stop]

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        return {"qzeros": _pack_interleaved(grid.zeros), "scales": grid.scales.contiguous()}

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        return Grid.of(
            spec.scheme, spec.shape, scales=tensors["scales"], zeros=_unpack_interleaved(tensors["qzeros"])
        )


def _pack_interleaved(codes: Tensor) -> Tensor:
    rows, columns = codes.shape
    return pack_last(codes.reshape(rows, columns // 8, 8)[..., _ORDER], 4)


def _unpack_interleaved(words: Tensor) -> Tensor:
    return unpack_last(words, 4)[..., _INVERSE].flatten(-2)
