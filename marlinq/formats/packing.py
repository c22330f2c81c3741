"""Packing of unsigned 4- and 8-bit codes into int32 words, natural order.

Slot i of a word holds bits ``bits*i .. bits*i + bits - 1``, i = 0 least significant. The sign bit of a word
is data. All functions work on the bytes of little-endian words, so that intermediates take at most one byte a
code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from marlinq.core.errors import EnvironmentProblem

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

if sys.byteorder != "little":  # every view below relies on it
    raise EnvironmentProblem("marlinq needs a little-endian host; this one is big-endian")


def slots_per_word(bits: int) -> int:
    """Codes in one int32 word: 8 for 4 bits, 4 for 8 bits."""
    return 32 // bits


def unpack_last(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] to uint8 [..., W, 32 / bits]: the slots of each word in natural order."""
    # Flattened first: view(dtype) rejects some strides of dimensions of size 1.
    octets = words.reshape(-1).view(torch.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def pack_last(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., W, 32 / bits] to int32 [..., W]; the inverse of :func:`unpack_last`."""
    octets = codes if bits == 8 else codes[..., 0::2] | (codes[..., 1::2] << 4)
    return octets.reshape(-1).view(torch.int32).reshape(codes.shape[:-1])


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """int32 [R, C] packed along dim 0 to uint8 [R * 32 / bits, C]."""
    rows, columns = words.shape
    octets = words.reshape(-1).view(torch.uint8).reshape(rows, columns, 4).transpose(1, 2)
    if bits == 8:
        return octets.reshape(rows * 4, columns)
    # Bytes are separated first, so that nibbles are computed on contiguous rows.
    octets = octets.contiguous()
    codes = torch.empty(rows, 4, 2, columns, dtype=torch.uint8, device=words.device)
    torch.bitwise_and(octets, 15, out=codes[:, :, 0])
    torch.bitwise_right_shift(octets, 4, out=codes[:, :, 1])
    return codes.reshape(rows * 8, columns)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """uint8 [R * 32 / bits, C] to int32 [R, C] packed along dim 0."""
    rows, columns = codes.shape[0] // slots_per_word(bits), codes.shape[1]
    if bits == 8:
        octets = codes.reshape(rows, 4, columns)
    else:
        pairs = codes.reshape(rows, 4, 2, columns)
        octets = pairs[:, :, 0] | (pairs[:, :, 1] << 4)
    return octets.transpose(1, 2).reshape(-1).view(torch.int32).reshape(rows, columns)


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """int32 [R, C] packed along dim 1 to uint8 [R, C * 32 / bits]."""
    return unpack_last(words, bits).flatten(-2)


def pack_columns(codes: Tensor, bits: int) -> Tensor:
    """uint8 [R, C * 32 / bits] to int32 [R, C] packed along dim 1."""
    slots = slots_per_word(bits)
    rows, columns = codes.shape
    return pack_last(codes.reshape(rows, columns // slots, slots), bits)


_FIELD_MASKS = {16: 0x0000FFFF, 8: 0x00FF00FF, 4: 0x0F0F0F0F}


def transpose_fields(words: Tensor) -> Tensor:
    """Transpose the square matrix that W words of W fields each form: field s of result[i] is field i of
    words[s].

    Args:
        words: int32 [W, M] with W = 8 (fields of 4 bits) or 4 (fields of 8 bits), M independent matrices.

    For all matrices at once, the off-diagonal quarters of ever smaller blocks are exchanged.
    """
    width, span = 16, words.shape[0] // 2
    shape = words.shape
    while span:
        mask = _FIELD_MASKS[width]
        blocks = words.reshape(-1, 2, span * shape[1])
        upper, lower = blocks[:, 0], blocks[:, 1]
        swapped = torch.empty_like(blocks)
        swapped[:, 0] = (upper & mask) | ((lower & mask) << width)
        swapped[:, 1] = ((upper >> width) & mask) | (lower & ~mask)
        words, width, span = swapped, width // 2, span // 2
    return words.reshape(shape)
