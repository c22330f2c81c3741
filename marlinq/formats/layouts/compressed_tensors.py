"""compressed-tensors ``pack-quantized`` layout (docs/formats.md).

    weight_packed     int32 [N, K*bits/32]   slot i of word c = codes[c*slots + i, n]
    weight_scale      fp16 or bf16 [N, G]
    weight_shape      int64 [2] = (N, K)
    weight_zero_point int32 [N*bits/32, G]   asymmetric only; packed along N; stores the zero point
    weight_g_idx      int32 [K]              only of old writers; read, never written

The compressed-tensors package holds signed values and adds 2**(bits-1) to codes and zero points before
packing, so stored bits are the codes and zero points of the neutral order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from marlinq.core.errors import CheckpointError
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
from marlinq.formats.packing import pack_rows, slots_per_word, unpack_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


class CompressedTensors(WordLayout):
    """compressed-tensors pack-quantized, 4 and 8 bits, symmetric and asymmetric."""

    name = "compressed-tensors"
    family = "compressed-tensors"
    key = "weight_packed"
    suffixes = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    scale_key = "weight_scale"
    read_only = ("weight_g_idx",)
    plain = PlainTensors(zeros="weight_zero_point", order="weight_g_idx", shape="weight_shape")
    elements = ("int4", "int8")
    scale_dtype = None

    def says_all(self, spec: ModuleSpec) -> bool:
        return not spec.scheme.stores_zeros and not spec.extras

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        if (reason := self.scheme_refusal(spec.scheme)) is not None:
            return reason
        bits = spec.scheme.element.bits
        slots = slots_per_word(bits)
        if spec.in_features % slots:
            return f"K={spec.in_features} is not a multiple of {slots} ({bits}-bit codes in one word)"
        if spec.scheme.stores_zeros and spec.out_features % slots:
            return f"N={spec.out_features} is not a multiple of {slots} (zero points in one word)"
        if spec.in_features % spec.channels_per_group:
            return f"K={spec.in_features} is not a multiple of the group size {spec.channels_per_group}"
        return None

    def value_refusal(self, grid: Grid) -> str | None:
        return g_idx_refusal(grid) or zero_range_refusal(grid, lowest=0)

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        k, n, groups = spec.in_features, spec.out_features, spec.groups
        slots = slots_per_word(spec.scheme.element.bits)
        tensors = {
            "weight_packed": TensorSpec("int32", (n, k // slots)),
            "weight_scale": TensorSpec(spec.scheme.scale_dtype, (n, groups)),
            "weight_shape": TensorSpec("int64", (2,)),
        }
        if spec.scheme.stores_zeros:
            tensors["weight_zero_point"] = TensorSpec("int32", (n // slots, groups))
        if "weight_g_idx" in spec.extras:
            tensors["weight_g_idx"] = TensorSpec("int32", (k,))
        return tensors

    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], element: Element) -> tuple[int, int]:
        rows, columns = shapes["weight_packed"]
        return columns * slots_per_word(element.bits), rows

    def from_natural(self, natural: Tensor) -> Tensor:
        return natural.t().contiguous()

    def to_natural(self, stored: Tensor) -> Tensor:
        return stored.t().contiguous()

    def channels(self, stored: Tensor, start: int, stop: int, element: Element) -> Tensor:
        slots = slots_per_word(element.bits)
        return stored[:, start // slots : stop // slots]

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        tensors = {
            "weight_scale": grid.scales.t().contiguous(),
            "weight_shape": torch.tensor([grid.out_features, grid.in_features], dtype=torch.int64),
        }
        if scheme.stores_zeros:
            tensors["weight_zero_point"] = pack_rows(grid.zeros.t().contiguous(), grid.element.bits)
        return tensors

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        shape = tensors["weight_shape"].tolist()
        if shape != [spec.out_features, spec.in_features]:
            raise CheckpointError(
                f"weight_shape: expected [{spec.out_features}, {spec.in_features}] from weight_packed, "
                f"found {shape}"
            )
        zeros = None
        if spec.scheme.stores_zeros:
            zeros = unpack_rows(tensors["weight_zero_point"], spec.scheme.element.bits).t().contiguous()
        return Grid.of(
            spec.scheme,
            spec.shape,
            scales=tensors["weight_scale"].t().contiguous(),
            zeros=zeros,
            g_idx=tensors.get("weight_g_idx"),
        )
