"""Weight formats: the order of codes in words, the value of a code, and the operator that multiplies them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from marlinq.core.sparsity import Sparsity

TILE_COLUMNS = 64
"""Columns of a tile, the smallest piece of words that kernels load."""

ScaleKind = Literal["quant_group"]
"""``quant_group``: scales [G, N] of the activations' type, each for a group of channels of one column."""


@dataclass(frozen=True)
class WeightFormat:
    """Element type and order in memory of a weight of K channels and N columns, as operators take it.

    Attributes:
        name: name in decisions and messages, such as ``int4``.
        operator: name in ``torch.ops.marlinq`` of the product with it.
        bits: stored bits per weight; for dense weights, the bits of a code.
        row_channels: channels that a stored row holds: words are int32 [K / row_channels, ...].
        scale: kind of scales: which weights share one.
        midpoint: the zero point of weights that store none, in units of a code.
        stores_zeros: whether weights may have zero points of their own.
        values: function (words, dtype) -> values of the codes [K, N] in that dtype, exact.
        pack: function (codes uint8 [K, N]) -> words; K a multiple of 16, N of 64.
        in_order: function (stored scales or zero points [G, N]) -> the same in the order of the columns.
        codec: CUDA template that turns words into register fragments of an element type (``cuda/codec``);
            None where no kernel reads the words, so that they are dequantised before the product.
        half_scale_power: power p of the factor 2^p in stored float16 scales; bfloat16 scales have none.
        unpack: instructions that turn 8 codes into fragments, (for float16, for bfloat16).
        dequantizing_bytes: bytes of device memory that :meth:`dequantize` moves per weight, in 16 bits.
        sums_codes: whether kernels may multiply raw codes and apply zero points to sums, also in integer
            digits (``cuda/mma/integer_digits.cuh``).
        fuses: whether one instruction subtracts the midpoint and multiplies by the scale.
        sparsity: rule by which weights are zero; None for dense weights.
        channel_multiple: K of a stored weight is a multiple of this.
        smallest_group: channels of the smallest group that kernels take, 16 or 32.
        largest_bfloat16_scale: exclusive upper bound of bfloat16 scales.
    """

    name: str
    operator: str
    bits: int
    row_channels: int
    scale: ScaleKind
    midpoint: float
    stores_zeros: bool
    values: Callable[[Tensor, torch.dtype], Tensor] = field(repr=False)
    pack: Callable[[Tensor], Tensor] = field(repr=False)
    in_order: Callable[[Tensor], Tensor] = field(repr=False)
    codec: str | None
    half_scale_power: int
    unpack: tuple[int, int]
    dequantizing_bytes: float
    sums_codes: bool = False
    fuses: bool = False
    sparsity: Sparsity | None = None
    channel_multiple: int = 64
    smallest_group: int = 32
    largest_bfloat16_scale: float = math.inf

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of words per weight, without scales and zero points."""
        return self.bits / 8

    @property
    def block_words(self) -> int:
        """32-bit words of codes that a lane holds of a stored row's 16 columns."""
        return self.bits * self.row_channels // 64

    @property
    def density(self) -> float:
        """Share of the channels that are stored and multiplied."""
        return 1.0 if self.sparsity is None else self.sparsity.kept / self.sparsity.span

    def scale_factor(self, dtype: torch.dtype) -> float:
        """Power of two by which stored scales of ``dtype`` are larger than true ones."""
        return 2.0**self.half_scale_power if dtype == torch.float16 else 1.0

    def rescaled(self, scales: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Stored scales in the dtype that ``change`` converts to, with that dtype's power of two."""
        before, after = (self.scale_factor(each.dtype) for each in (scales, change(scales.new_empty(0))))
        return scales if before == after else scales.to(torch.float32) * (after / before)

    @property
    def row_bytes(self) -> int:
        """Bytes per stored row and column."""
        return self.row_channels * self.bits // 8

    @property
    def row_words(self) -> int:
        """32-bit words per stored row and column."""
        return self.row_bytes // 4

    def chunk_bytes(self, rows: int) -> int:
        """Bytes of words per column in a chunk of ``rows`` times 16 channels."""
        return 16 * rows // self.row_channels * self.row_bytes

    @property
    def tile_words(self) -> int:
        """32-bit words per stored row and tile of 64 columns."""
        return TILE_COLUMNS * self.row_words

    def shape(self, words: Tensor) -> tuple[int, int]:
        """K and N of a weight, from the shape of its words."""
        return words.shape[0] * self.row_channels, words.shape[-1] // self.row_words

    def dequantize(self, words: Tensor, scales: Tensor, zeros: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The dense weight [K, N] in ``dtype``; values minus zero points are exact, products round once.

        Args:
            words: int32 [K / row_channels, N * row_words], N a multiple of 64; may be a strided view.
            scales: [G, N], stored order.
            zeros: None or [G, N], stored order.
            dtype: dtype of the arithmetic and of the result.
        """
        values = self.values(words, dtype)
        k, n = values.shape
        groups = values.view(scales.shape[0], k // scales.shape[0], n)
        offset = self.midpoint if zeros is None else self.in_order(zeros).to(dtype)[:, None]
        if zeros is not None or self.midpoint:
            groups -= offset
        if self.scale_factor(scales.dtype) != 1:
            groups *= 1 / self.scale_factor(scales.dtype)
        groups *= self.in_order(scales).to(dtype)[:, None]
        return values


WEIGHT_FORMATS: dict[str, WeightFormat] = {}
"""Every format by name."""


def register_weight_format(weight_format: WeightFormat) -> WeightFormat:
    """Make a format known by its name; returns it.

    Raises:
        ValueError: another format has the name.
    """
    if WEIGHT_FORMATS.setdefault(weight_format.name, weight_format) != weight_format:
        raise ValueError(f"weight format {weight_format.name!r} is registered already")
    return weight_format
