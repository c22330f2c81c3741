"""The result of a GPTQ solve, and the least-squares fit of a group's scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.scheme import Element, Scheme
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.methods.grid import nearest_scales

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of a GPTQ solve, with input channels in processing order.

    Attributes:
        codes: uint8 [K, N].
        scales: float32 [G, N].
        zeros: zero points float32 [G, N].
        loss: float64 [N].
        element: element type of the codes.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    loss: Tensor
    element: Element

    @classmethod
    def empty(cls, w: Tensor, g: int, element: Element) -> Solution:
        """An uninitialised solution, with a loss of zero, for weights w, float32 [K, N], in groups of g
        channels."""
        k, n = w.shape
        codes = torch.empty((k, n), dtype=torch.uint8, device=w.device)
        scales = torch.empty((k // g, n), device=w.device)
        loss = torch.zeros(n, dtype=torch.float64, device=w.device)
        return cls(codes, scales, torch.empty_like(scales), loss, element)

    def dense(self, g: int) -> Tensor:
        """The dequantised weights, float32 [K, N], in processing order, in groups of g channels."""
        codes = self.element.decode(self.codes).reshape(len(self.scales), g, -1)
        return ((codes - self.zeros.unsqueeze(1)) * self.scales.unsqueeze(1)).reshape(self.codes.shape)

    def weights(
        self,
        order: Tensor,
        widths: Sequence[int],
        g: int,
        scheme: Scheme,
        seconds: Sequence[Tensor | None],
    ) -> list[QuantizedWeight]:
        """The quantised weights, which lie side by side, with channels in their own order.

        Args:
            order: int64 [K], the channels in processing order, whose groups stay whole.
            widths: output channels of each weight.
            g: channels of a group.
            scheme: scheme of the weights.
            seconds: second-level scale of each weight, where the scheme has one.
        """
        back = torch.argsort(order)
        # The processing position of a group's first channel gives the group's position.
        group_back = back[::g] // g
        codes = self.codes[back]
        scales = self.scales[group_back].to(torch_dtype(scheme.scale_dtype))
        zeros = self.zeros[group_back].to(torch.uint8)
        g_idx = trivial_g_idx(len(back), g, codes.device)
        parts = (torch.split(part, list(widths), dim=1) for part in (codes, scales, zeros))
        return [
            QuantizedWeight.from_codes(
                scheme,
                c.contiguous(),
                scales=s.contiguous(),
                zeros=z.contiguous(),
                g_idx=g_idx,
                tensor_scale=second,
            )
            for c, s, z, second in zip(*parts, seconds, strict=True)
        ]


def refit(scales: Tensor, reached: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """The scales that minimise a group's loss for given codes; ``terms`` are updated in place.

    Args:
        scales: float32 [N], scales with which the codes were found.
        reached: float32 [g, N], R^T (codes - zeros), the contribution of a scale of 1.
        terms: float32 [g, N], the loss terms R^T (w - q); overwritten with those of the new scales.
        dtype: dtype to which scales are rounded. The rounded least-squares solution is at least as good as
            the old scale, since both are of this dtype.
    """
    overlap, power = (reached * terms).sum(dim=0), reached.square().sum(dim=0)
    best = scales + overlap / power
    # Scales of 8 bits are magnitudes.
    solvable = (power > 0) & (best != 0 if dtype.itemsize > 1 else best > 0)
    fitted = torch.where(solvable, nearest_scales(best, dtype), scales)
    terms.addcmul_(reached, fitted - scales, value=-1)
    return fitted
