"""The operand of the sparse kernel: kept codes in Marlin tiles, masks in the order of mma.sp, scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.core.weight import Grid, QuantizedWeight
from marlinq.formats.layouts.marlin import pack_tiles, permute_scales, unpack_tiles
from marlinq.formats.layouts.marlin_24 import kept_codes, places
from marlinq.kernels.sparse.config import GROUPS

_ROW = 32
"""Channels of a stored row."""
_ZERO = 8  # the code of 0


@dataclass(frozen=True, eq=False)
class SparseOperand:
    """A 2:4 sparse weight; all tensors are on one device.

    Attributes:
        words: int32 [K/32, 2N], kept codes [K/2, N] in Marlin's order.
        masks: int32 [K/32, N], which two of every four channels are kept, 4 bits for every four channels.
            Word 2l + j of tile (kt, nt) belongs to lane l. With q = 2j + l%4/2, its low half is of channels
            32 kt + 16 (l%2) .. + 15 of output 64 nt + 16 q + l/4, its high half of the output 8 further.
        scales: float16 or bfloat16 [G, N], in the order of Marlin's scales.
        granularity: granularity of the scales.
    """

    words: Tensor
    masks: Tensor
    scales: Tensor
    granularity: Granularity

    @property
    def in_features(self) -> int:
        """K."""
        return self.words.shape[0] * _ROW

    @property
    def out_features(self) -> int:
        """N."""
        return self.words.shape[1] // 2

    @property
    def nbytes(self) -> int:
        """Bytes of words, masks and scales, which a product reads."""
        return self.words.nbytes + self.masks.nbytes + self.scales.nbytes

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The dense weight [N, K]."""
        kept = unpack_tiles(self.words)
        words = _unmasked(self.masks).to(torch.int32)
        descriptors = torch.stack([words >> 4 * part & 15 for part in range(4)], dim=1)
        descriptors = descriptors.reshape(-1, self.out_features)
        index = torch.stack((descriptors & 3, descriptors >> 2), dim=1).long()
        shape = (self.in_features // TWO_OF_FOUR.span, TWO_OF_FOUR.span, self.out_features)
        codes = torch.full(shape, _ZERO, dtype=torch.uint8, device=kept.device)
        codes.scatter_(1, index, kept.reshape(-1, 2, self.out_features))
        values = codes.reshape(len(self.scales), -1, self.out_features).float() - _ZERO
        scales = permute_scales(self.scales).float().unsqueeze(1)
        return (values * scales).reshape(self.in_features, -1).t().to(dtype)


def sparse_refusal(weight: Grid) -> str | None:
    """Why the kernel can't multiply with ``weight``, in one clause; None if it can. Codes are not checked."""
    if weight.sparsity != TWO_OF_FOUR:
        return f"dense weights; the kernel multiplies {TWO_OF_FOUR.describe()} ones"
    if weight.element.name != "int4":
        return f"{weight.element.name} weights; the kernel multiplies int4"
    if weight.scheme.stores_zeros:
        return "zero points; the kernel has none"
    if not weight.has_trivial_g_idx:
        return "activation order; the kernel has none"
    if weight.in_features % 64 or weight.out_features % 64:
        return f"K={weight.in_features} and N={weight.out_features}; the kernel takes multiples of 64"
    if weight.granularity not in GROUPS:
        sizes = ", ".join(str(each.group_size) for each in GROUPS)
        return f"{weight.granularity.describe()}; the kernel takes group sizes {sizes}"
    return None


def sparse_operand(q: QuantizedWeight, dtype: torch.dtype) -> SparseOperand:
    """The operand that holds exactly the weights of ``q``; scales are rounded to ``dtype``.

    Raises:
        ValueError: :func:`sparse_refusal` has a reason, or the codes are not sparse.
    """
    reason = sparse_refusal(q) or TWO_OF_FOUR.refusal(q.used())
    if reason is not None:
        raise ValueError(reason)
    return SparseOperand(
        pack_tiles(kept_codes(q.codes, _ZERO)),
        _masked(_descriptors(q.codes)),
        permute_scales(q.scales).to(dtype),
        q.granularity,
    )


def _descriptors(codes: Tensor) -> Tensor:
    """Which channels are kept, int32 [K/16, N]: a descriptor of 4 bits for every four channels, low bits
    first."""
    two = places(codes, _ZERO)
    four = (two[:, 0] | two[:, 1] << 2).to(torch.int32).reshape(-1, 4, codes.shape[1])
    return four[:, 0] | four[:, 1] << 4 | four[:, 2] << 8 | four[:, 3] << 12


def _masked(words: Tensor) -> Tensor:
    """Descriptors int32 [K/16, N] in the order of :attr:`SparseOperand.masks`."""
    rows, n = words.shape
    # [kt, half of 32 channels, nt, j, q % 2, low or high half of a word, l / 4].
    tiles = words.reshape(rows // 2, 2, n // 64, 2, 2, 2, 8)
    pairs = tiles[:, :, :, :, :, 0] | tiles[:, :, :, :, :, 1] << 16
    # To [kt, nt, l / 4, q % 2, half of 32 channels, j]: tile, lane, word.
    return pairs.permute(0, 2, 5, 4, 1, 3).reshape(rows // 2, n).contiguous()


def _unmasked(masks: Tensor) -> Tensor:
    """The inverse of :func:`_masked`."""
    rows, n = masks.shape
    pairs = masks.reshape(rows, n // 64, 8, 2, 2, 2).permute(0, 4, 1, 5, 3, 2)
    return torch.stack((pairs & 0xFFFF, pairs >> 16 & 0xFFFF), dim=5).reshape(2 * rows, n)
