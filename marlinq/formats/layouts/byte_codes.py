"""The base of layouts that store codes as rows of bytes: FP8, MX, NV and plain int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.scheme import Element
from marlinq.formats.layouts.layout import Layout, ModuleSpec, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


class ByteLayout(Layout):
    """A layout of bytes: [N, K] for 8-bit codes, [N, K/2] for 4-bit codes, even channels in the low nibble.

    These are natural bytes. A layout that stores other bytes, such as signed codes, overrides
    :meth:`to_bytes` and :meth:`from_bytes`.
    """

    code_dtype = "uint8"

    def to_bytes(self, stored: Tensor) -> Tensor:
        """Natural bytes, uint8 [N, K*bits/8], from the tensor stored under ``key``."""
        return stored.view(torch.uint8)

    def from_bytes(self, natural: Tensor) -> Tensor:
        """The inverse of :meth:`to_bytes`."""
        return natural.view(torch_dtype(self.code_dtype))

    def pack_codes(self, codes: Tensor, spec: ModuleSpec) -> Tensor:
        rows = codes.t().contiguous()
        if spec.scheme.element.bits == 4:
            rows = rows[:, 0::2] | (rows[:, 1::2] << 4)
        return self.from_bytes(rows)

    def unpack_codes(self, stored: Tensor, spec: ModuleSpec, mask: Tensor | None = None) -> Tensor:
        rows = self.to_bytes(stored)
        if spec.scheme.element.bits == 4:
            rows = torch.stack((rows & 15, rows >> 4), dim=-1).flatten(-2)
        return rows.t().contiguous()

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        if (reason := self.scheme_refusal(spec.scheme)) is not None:
            return reason
        if spec.in_features * spec.scheme.element.bits % 8:
            return f"K={spec.in_features} is odd ({spec.scheme.element.bits}-bit codes in one byte)"
        return None

    def codes_spec(self, spec: ModuleSpec) -> TensorSpec:
        """Dtype and shape of the tensor under ``key``."""
        width = spec.in_features * spec.scheme.element.bits // 8
        return TensorSpec(self.code_dtype, (spec.out_features, width))

    def infer_shape(self, shapes: Mapping[str, tuple[int, ...]], element: Element) -> tuple[int, int]:
        rows, width = shapes[self.key]
        return width * 8 // element.bits, rows
