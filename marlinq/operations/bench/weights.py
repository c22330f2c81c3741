"""Random weights in the layouts of kernels and peers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4 as INT4_ELEMENT
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.formats.layouts.marlin import pack_tiles
from marlinq.kernels import Operand
from marlinq.kernels.contract.weight_formats import E4M3, INT4, WeightFormat
from marlinq.operations.bench.shapes import Layer

MIDPOINT = 8
"""Code of zero in a symmetric 4-bit weight."""
_EVEN_EXPONENTS = 0xF7F7F7F7 - 2**32


@dataclass(frozen=True)
class Weight:
    """A random weight in the kernel's layout; codes and scales in channel order exist for 4 bits only."""

    layer: Layer
    operand: Operand

    @property
    def words(self) -> Tensor:
        """Words of the weight format."""
        return self.operand.words

    @property
    def scales(self) -> Tensor:
        """Scales [G, N] in stored order."""
        return self.operand.scales

    @property
    def zeros(self) -> Tensor | None:
        """Zero points [G, N] in stored order, or None."""
        return self.operand.zeros

    @property
    def group_size(self) -> int:
        """Input channels per scale as peers take it: 32, 64, 128 or -1."""
        return self.operand.granularity.group_size

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales and zero points."""
        return self.words.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def dense(self) -> Tensor:
        """Dequantised weight, float32 [K, N]."""
        return self.operand.dequantize(torch.float32)

    def codes(self) -> Tensor:
        """Codes, uint8 [K, N]."""
        ones = torch.ones_like(self.scales[:1])
        values = self.operand.format.dequantize(self.words, ones, None, torch.float32)
        return (values + MIDPOINT).to(torch.uint8)

    def natural_scales(self) -> Tensor:
        """Scales [G, N] in channel order."""
        return self._natural(self.scales)

    def natural_zeros(self) -> Tensor | None:
        """Zero points, uint8 [G, N], in channel order; None without any."""
        return None if self.zeros is None else self._natural(self.zeros).to(torch.uint8)

    def _natural(self, stored: Tensor) -> Tensor:
        # A weight with all codes 9 and zero point 8 dequantises to its scales, in channel order.
        nine = torch.full(
            (stored.shape[0], self.words.shape[1]),
            0x99999999 - 2**32,
            dtype=torch.int32,
            device=stored.device,
        )
        return self.operand.format.dequantize(nine, stored, None, torch.float32)[::16].to(stored.dtype)


def random_weight(
    layer: Layer,
    granularity: Granularity,
    *,
    asymmetric: bool,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat,
) -> Weight:
    """Random codes, and scales that keep the products of unit activations near one.

    4-bit codes are 1..15 with mean 8. Code 0 is replaced by 8, because a peer is faster for symmetric weights
    without it. The mean of the weights is zero, since a mean would grow through a chain of layers.
    """
    groups = granularity.groups(layer.k)
    rows, columns = layer.k // weight_format.row_channels, layer.n * weight_format.row_words
    words = torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int32, device=device)
    if weight_format.sparsity is not None:
        words = weight_format.pack(_pruned_codes(torch.randint(1, 16, (layer.k, layer.n), device=device)))
    if weight_format == INT4:
        words |= (~(words | words >> 1 | words >> 2 | words >> 3) & 0x11111111) << 3
    elif weight_format == E4M3:
        # Clears the lowest bit of every exponent, so that no code is NaN.
        words &= _EVEN_EXPONENTS
    deviation = float(weight_format.values(words[:, : weight_format.tile_words], torch.float32).std())
    unit = weight_format.scale_factor(dtype) / (deviation * layer.k**0.5)
    scales = (unit * (0.5 + torch.rand(groups, layer.n, device=device))).to(dtype)
    middle = int(weight_format.midpoint)
    points = (
        torch.randint(middle // 2, middle * 3 // 2, (groups, layer.n), device=device) if asymmetric else None
    )
    zeros = None if points is None else points.to(dtype)
    return Weight(layer, Operand.whole(weight_format, granularity, words, scales, zeros))


def pruned(weight: Weight) -> Weight:
    """A random weight with two of every four channels kept, at random places."""
    words = pack_tiles(_pruned_codes(weight.codes()))
    return replace(weight, operand=replace(weight.operand, words=words))


def _pruned_codes(codes: Tensor) -> Tensor:
    """Codes uint8 [K, N] with the code of zero in two of every four channels, at random places."""
    kept = TWO_OF_FOUR.largest(torch.rand(codes.shape, device=codes.device))
    return torch.where(kept, codes, INT4_ELEMENT.midpoint).to(torch.uint8)
