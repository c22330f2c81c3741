"""Rewriting one module's codes from one layout to another, a slab of input channels at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from marlinq.formats import Format, ModuleSpec

_SLAB_CODES = 1 << 21
_CHANNELS = 16


def transcode(words: Tensor, spec: ModuleSpec, source: Format, target: Format) -> Tensor:
    """The words that ``target`` stores for the codes that ``source`` stores as ``words``.

    Works on slabs of about two million codes: they stay in the processor's caches, and unpacked codes never
    take more than a few MB whatever the size of the tensor.

    Args:
        words: the source's codes tensor, of the shape that ``spec`` says.
        spec: the module; ``target`` must be able to hold its shape.
    """
    if source.family == target.family:
        return words
    want = target.expected(spec)[target.key]
    result = torch.empty(want.shape, dtype=want.dtype)
    step = max(_CHANNELS, _SLAB_CODES // spec.out_features // _CHANNELS * _CHANNELS)
    for start in range(0, spec.in_features, step):
        stop = min(start + step, spec.in_features)
        codes = source.unpack_codes(source.channels(words, start, stop, spec.bits), spec.bits)
        target.channels(result, start, stop, spec.bits).copy_(target.pack_codes(codes, spec.bits))
    return result
