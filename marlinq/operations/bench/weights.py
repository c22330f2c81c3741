"""Random weights in the layouts of kernels and peers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlinq.core.float_elements import E4M3 as E4M3_ELEMENT
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import ELEMENTS
from marlinq.core.scheme import INT4 as INT4_ELEMENT
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.formats.layouts.marlin import pack_tiles
from marlinq.kernels import Operand
from marlinq.kernels.contract.weight_formats import E4M3, INT4, INT8, WeightFormat
from marlinq.operations.bench.shapes import LinearSize

MIDPOINT = 8
"""Code of zero in a symmetric 4-bit weight."""
_EVEN_EXPONENTS = 0xF7F7F7F7 - 2**32


@dataclass(frozen=True)
class Weight:
    """A random weight in the kernel's layout.

    Attributes:
        layer: name and size.
        operand: the weight as kernels take it.
        scale_dtype: dtype of the scales in files of the scheme. It holds these scales exactly if they are
            divided by one power of two. None where files store scales in the activations' dtype.
    """

    layer: LinearSize
    operand: Operand
    scale_dtype: torch.dtype | None = None

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
        return stored_codes(self.operand.format, self.words)

    def natural_scales(self) -> Tensor:
        """True scales [G, N], without a weight format's power of two, in channel order and activations'
        dtype."""
        return true_scales(self.operand.format, self.scales)

    def natural_zeros(self) -> Tensor | None:
        """Zero points, uint8 [G, N], in channel order; None without any."""
        return None if self.zeros is None else self.operand.format.in_order(self.zeros).to(torch.uint8)


def stored_codes(weight_format: WeightFormat, words: Tensor) -> Tensor:
    """Codes uint8 [K, N] of a dense weight's words; a float's negative zero becomes the positive one."""
    return ELEMENTS[weight_format.name].nearest(weight_format.values(words, torch.float32))


def true_scales(weight_format: WeightFormat, scales: Tensor) -> Tensor:
    """Scales [G, N] in channel order, from ``scales`` as kernels take them; the dtype stays."""
    natural = weight_format.in_order(scales)
    return (natural.float() / weight_format.scale_factor(scales.dtype)).to(scales.dtype)


def scale_level(scales: Tensor) -> float:
    """The least power of two such that positive ``scales`` divided by it fit E4M3."""
    return 2.0 ** math.ceil(math.log2(float(scales.max()) / E4M3_ELEMENT.ends[1]))


def _held(scales: Tensor, scale_dtype: torch.dtype | None) -> Tensor:
    """Positive scales, float32, rounded to values of ``scale_dtype`` times one power of two."""
    if scale_dtype is None:
        return scales
    if scale_dtype == torch.float8_e8m0fnu:
        return torch.exp2(torch.round(torch.log2(scales)))
    level = scale_level(scales)
    return (scales / level).to(scale_dtype).float() * level


def random_weight(
    layer: LinearSize,
    granularity: Granularity,
    *,
    asymmetric: bool,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat,
    scale_dtype: torch.dtype | None = None,
) -> Weight:
    """Random codes, and scales that keep the products of unit activations near one.

    Integers have no code 0, because a peer is faster for symmetric weights without it.
    The mean of the weights is zero, since a mean would grow through a chain of layers.

    Args:
        layer: name and size.
        granularity: granularity of the scales.
        asymmetric: whether there are zero points.
        dtype: dtype of the stored scales.
        device: device to make it on.
        weight_format: type and order of the codes.
        scale_dtype: as in :class:`Weight`.
    """
    groups = granularity.groups(layer.k)
    rows, columns = layer.k // weight_format.row_channels, layer.n * weight_format.row_words
    words = torch.randint(-(2**31), 2**31, (rows, columns), dtype=torch.int32, device=device)
    if weight_format.sparsity is not None:
        words = weight_format.pack(_pruned_codes(torch.randint(1, 16, (layer.k, layer.n), device=device)))
    if weight_format == INT4:
        words |= (~(words | words >> 1 | words >> 2 | words >> 3) & 0x11111111) << 3
    elif weight_format == INT8:
        every_byte = words.view(torch.uint8)
        every_byte[every_byte == 0] = int(INT8.midpoint)
    elif weight_format == E4M3:
        # Clears the lowest bit of every exponent, so that no code is NaN.
        words &= _EVEN_EXPONENTS
    deviation = float(weight_format.values(words[:, : weight_format.tile_words], torch.float32).std())
    unit = weight_format.scale_factor(dtype) / (deviation * layer.k**0.5)
    scales = _held(unit * (0.5 + torch.rand(groups, layer.n, device=device)), scale_dtype).to(dtype)
    middle = int(weight_format.midpoint)
    points = (
        torch.randint(middle // 2, middle * 3 // 2, (groups, layer.n), device=device) if asymmetric else None
    )
    zeros = None if points is None else points.to(dtype)
    return Weight(layer, Operand.whole(weight_format, granularity, words, scales, zeros), scale_dtype)


def pruned(weight: Weight) -> Weight:
    """A random weight with two of every four channels kept, at random places."""
    words = pack_tiles(_pruned_codes(weight.codes()))
    return replace(weight, operand=replace(weight.operand, words=words))


def _pruned_codes(codes: Tensor) -> Tensor:
    """Codes uint8 [K, N] with the code of zero in two of every four channels, at random places."""
    kept = TWO_OF_FOUR.largest(torch.rand(codes.shape, device=codes.device))
    return torch.where(kept, codes, INT4_ELEMENT.midpoint).to(torch.uint8)
