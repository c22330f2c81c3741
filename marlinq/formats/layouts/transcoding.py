"""From one layout's codes to another's, without unpacking where both store words or both store bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marlinq.formats.layouts.base import Layout, ModuleSpec
from marlinq.formats.layouts.byte_codes import ByteLayout
from marlinq.formats.layouts.words import WordLayout, permuted

if TYPE_CHECKING:
    from torch import Tensor


def transcode(stored: Tensor, spec: ModuleSpec, source: Layout, target: Layout) -> Tensor:
    """What ``target`` stores for the codes that ``source`` stores as ``stored``.

    Args:
        stored: the source's codes tensor, of the shape that ``spec`` says.
        spec: the module; ``target`` must be able to hold its shape.

    Neither layout has a mask; the codes of such a one are unpacked (:meth:`Layout.pack`).
    """
    if source is target or source.family == target.family:
        return stored
    if isinstance(source, WordLayout) and isinstance(target, WordLayout):
        return permuted(stored, spec, source, target)
    if isinstance(source, ByteLayout) and isinstance(target, ByteLayout):
        return target.from_bytes(source.to_bytes(stored))
    return target.pack_codes(source.unpack_codes(stored, spec), spec)
