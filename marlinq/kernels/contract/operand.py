"""The weight that a product multiplies with: one value from loading to launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Activations
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.contract.weight_formats import WeightFormat


@dataclass(frozen=True, eq=False)
class Operand:
    """A quantised weight as kernels read it; K' and N' are K and N after padding to multiples of 64.

    Attributes:
        format: weight format of the words.
        granularity: one scale a column (channel), or groups of 16, 32, 64 or 128 channels; a group of K' or
            more is stored as one scale a column.
        words: int32 [K' / format.row_channels, N' * format.row_words].
        scales: [G, N'] in the dtype of the activations, columns in the format's stored order
            (:func:`marlinq.formats.layouts.marlin.permute_scales` for INT4).
        zeros: zero points like ``scales``; None where all are the format's midpoint.
        order: int32 [K'], the input channel that each row multiplies, -1 for padding; None for 0, 1, 2, ...
        in_features: K.
        out_features: N.
        activations: 8-bit format of activations that the checkpoint names or the caller asks for, used for
            the values of M where it is faster (:mod:`marlinq.kernels.choose.eight_bit_decision`). None keeps
            them in 16 bits.
        input_scale: scale of static activations, float32 []; None where they are dynamic, or not quantised.
    """

    format: WeightFormat
    granularity: Granularity
    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    in_features: int
    out_features: int
    activations: Activations | None = None
    input_scale: Tensor | None = None

    @classmethod
    def whole(
        cls,
        weight_format: WeightFormat,
        granularity: Granularity,
        words: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        order: Tensor | None = None,
    ) -> Operand:
        """An operand without padding."""
        return cls(weight_format, granularity, words, scales, zeros, order, *weight_format.shape(words))

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(K', N')."""
        return self.format.shape(self.words)

    def problem(self, m: int, activation: str | None = None) -> Problem:
        """The product with ``m`` rows of activations of the scales' dtype."""
        k, n = self.padded_shape
        granularity = self.granularity.for_channels(k)
        bfloat16 = self.scales.dtype == torch.bfloat16
        return Problem(m, n, k, granularity, self.zeros is not None, bfloat16, self.format, activation)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight [K', N'] in ``dtype``, rows in stored order."""
        return self.format.dequantize(self.words, self.scales, self.zeros, dtype)

    def columns(self, part: slice) -> Operand:
        """The columns ``part``, whose ends are multiples of 64; none of them may be padding."""
        words = slice(part.start * self.format.row_words, part.stop * self.format.row_words)
        zeros = None if self.zeros is None else self.zeros[:, part]
        return Operand(
            self.format,
            self.granularity,
            self.words[:, words],
            self.scales[:, part],
            zeros,
            self.order,
            self.in_features,
            part.stop - part.start,
        )
