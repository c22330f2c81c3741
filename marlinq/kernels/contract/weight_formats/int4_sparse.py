"""4-bit integers with two of every four channels kept, in the order of ``cuda/codec/int4_sparse.cuh``.

Words are int32 [K/32, 3N], 192 of them a tile of 32 channels x 64 columns. The first 128 are the codes of the
16 kept channels, the other 64 their places. Word 64 j + 2 l + i of the codes is word 4 l + 2 j + i of a
Marlin tile. Place word 32 j + l belongs to lane l. Its low half describes channels 16 (l%2) to 16 (l%2) + 15
of the tile in column 16 q + l/4, where q = 2j + l%4/2; its high half describes column 16 q + l/4 + 8. Every
four channels take 4 bits, lowest first: the places of the two kept channels, ascending, two bits each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.formats.layouts.marlin import TILE_K, TILE_N, pack_tiles, permute_scales, unpack_tiles
from marlinq.formats.layouts.marlin_24 import kept_codes, places
from marlinq.kernels.contract.weight_formats.weight_format import WeightFormat, register_weight_format

_ZERO = 8
"""Code of zero."""
_SPAN = TWO_OF_FOUR.span
_ROW = 2 * TILE_K
"""Channels of a stored row."""
_CODES, _PLACES = 2 * TILE_N, TILE_N
"""Words of codes and of places in a tile."""


def pack_sparse(codes: Tensor) -> Tensor:
    """Words int32 [K/32, 3N] of codes uint8 [K, N]; K a multiple of 32, N of 64.

    Raises:
        ValueError: more than two of some four codes are not zero.
    """
    reason = TWO_OF_FOUR.refusal(codes != _ZERO)
    if reason is not None:
        raise ValueError(reason)
    rows, tiles = codes.shape[0] // _ROW, codes.shape[1] // TILE_N
    kept = pack_tiles(kept_codes(codes, _ZERO)).reshape(rows, tiles, 32, 2, 2)
    kept = kept.transpose(2, 3).reshape(rows, tiles, _CODES)
    ordered = _ordered(_descriptors(codes)).reshape(rows, tiles, _PLACES)
    return torch.cat((kept, ordered), dim=2).reshape(rows, -1)


def values(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes [K, N] in ``dtype`` of words int32 [K/32, 3N]; channels that are not kept have the code of
    zero."""
    rows, tiles = words.shape[0], words.shape[1] // (_CODES + _PLACES)
    parts = words.reshape(rows, tiles, -1)
    marlin = parts[..., :_CODES].reshape(rows, tiles, 2, 32, 2).transpose(2, 3)
    kept = unpack_tiles(marlin.reshape(rows, -1))
    descriptors = _unordered(parts[..., _CODES:].reshape(rows, -1))
    four = torch.stack([descriptors >> 4 * part & 15 for part in range(4)], dim=1)
    four = four.reshape(-1, tiles * TILE_N)
    index = torch.stack((four & 3, four >> 2), dim=1).long()
    codes = torch.full((len(four), _SPAN, four.shape[1]), _ZERO, dtype=torch.uint8, device=words.device)
    codes.scatter_(1, index, kept.reshape(len(four), 2, -1))
    return codes.reshape(_SPAN * len(four), -1).to(dtype)


def _descriptors(codes: Tensor) -> Tensor:
    """Places of the kept channels, int32 [K/16, N]: 4 bits for every four channels, low bits first."""
    two = places(codes, _ZERO)
    four = (two[:, 0] | two[:, 1] << 2).to(torch.int32).reshape(-1, 4, codes.shape[1])
    return four[:, 0] | four[:, 1] << 4 | four[:, 2] << 8 | four[:, 3] << 12


def _ordered(descriptors: Tensor) -> Tensor:
    """Place words int32 [K/32, N] of descriptors int32 [K/16, N]."""
    rows, n = descriptors.shape
    # [kt, half of 32 channels, nt, j, q % 2, low or high half of a word, l / 4].
    tiles = descriptors.reshape(rows // 2, 2, n // TILE_N, 2, 2, 2, 8)
    pairs = tiles[:, :, :, :, :, 0] | tiles[:, :, :, :, :, 1] << 16
    # To [kt, nt, j, l / 4, q % 2, half of 32 channels]: tile, word, lane.
    return pairs.permute(0, 2, 3, 5, 4, 1).reshape(rows // 2, n)


def _unordered(ordered: Tensor) -> Tensor:
    """The inverse of :func:`_ordered`."""
    rows, n = ordered.shape
    pairs = ordered.reshape(rows, n // TILE_N, 2, 8, 2, 2).permute(0, 5, 1, 2, 4, 3)
    return torch.stack((pairs & 0xFFFF, pairs >> 16 & 0xFFFF), dim=5).reshape(2 * rows, n)


INT4_SPARSE = register_weight_format(
    WeightFormat(
        name="int4-2:4",
        operator="w4a16_sparse_gemm",
        bits=3,
        row_channels=_ROW,
        scale="quant_group",
        midpoint=float(_ZERO),
        stores_zeros=False,
        values=values,
        pack=pack_sparse,
        in_order=permute_scales,
        codec="SparseInt4",
        half_scale_power=0,
        # Per 8 kept weights, the instructions of int4.
        unpack=(9, 11),
        # Bytes a weight: 1 + 1 + 1 to separate and order kept codes, 4 + 8 for places, 1 + 3 to spread the
        # codes, 4 for zero points, 4 for scales.
        dequantizing_bytes=27.0,
        fuses=True,
        sparsity=TWO_OF_FOUR,
        channel_multiple=128,
    )
)
