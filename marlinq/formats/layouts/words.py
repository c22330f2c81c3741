"""The base of layouts that pack codes into int32 words: GPTQ, AWQ, Marlin, compressed-tensors."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from marlinq.core.scheme import Element
from marlinq.formats.layouts.layout import Layout, ModuleSpec
from marlinq.formats.packing import pack_rows, slots_per_word, unpack_rows

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

# Codes of a slab: few enough for a processor's caches. On a GPU every slab costs launches, so slabs are
# larger.
_SLAB_CODES = {"cpu": 1 << 21, "cuda": 1 << 23}
_SLAB_STEP = 16


class WordLayout(Layout):
    """A layout of int32 words.

    Natural words are int32 [K*bits/32, N]; slot i of word (r, n) holds the code of channel r*slots + i. Every
    layout of words stores a permutation of these codes, and converts to and from natural words without
    unpacking.
    """

    @abstractmethod
    def from_natural(self, natural: Tensor) -> Tensor:
        """The words stored under ``key`` from natural words."""

    @abstractmethod
    def to_natural(self, stored: Tensor) -> Tensor:
        """The inverse of :meth:`from_natural`."""

    @abstractmethod
    def channels(self, stored: Tensor, start: int, stop: int, element: Element) -> Tensor:
        """View of ``stored`` with input channels ``start .. stop - 1``; both are multiples of 16, or K."""

    def pack_codes(self, codes: Tensor, spec: ModuleSpec) -> Tensor:
        return permuted(pack_rows(codes, spec.scheme.element.bits), spec, None, self)

    def unpack_codes(self, stored: Tensor, spec: ModuleSpec, mask: Tensor | None = None) -> Tensor:
        return unpack_rows(permuted(stored, spec, self, None), spec.scheme.element.bits)


def permuted(words: Tensor, spec: ModuleSpec, source: WordLayout | None, target: WordLayout | None) -> Tensor:
    """The words of layout ``target`` for codes that ``source`` stores as ``words``; None stands for natural
    words.

    Works on slabs of some million codes, which stay in the processor's caches and take a few MB of memory.
    """
    element = spec.scheme.element
    slots = slots_per_word(element.bits)
    natural_shape = (spec.in_features // slots, spec.out_features)
    shape = target.expected(spec)[target.key].shape if target else natural_shape
    result = torch.empty(shape, dtype=torch.int32, device=words.device)
    slab_codes = _SLAB_CODES["cuda" if words.is_cuda else "cpu"]
    step = max(_SLAB_STEP, slab_codes // spec.out_features // _SLAB_STEP * _SLAB_STEP)
    for start in range(0, spec.in_features, step):
        stop = min(start + step, spec.in_features)
        rows = slice(start // slots, stop // slots)
        natural = source.to_natural(source.channels(words, start, stop, element)) if source else words[rows]
        slab = target.channels(result, start, stop, element) if target else result[rows]
        slab.copy_(target.from_natural(natural) if target else natural)
    return result
