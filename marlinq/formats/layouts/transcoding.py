"""Convert packed codes between layouts, without unpacking where both store words or both store bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marlinq.formats.layouts.byte_codes import ByteLayout
from marlinq.formats.layouts.layout import Layout, ModuleSpec
from marlinq.formats.layouts.words import WordLayout, permuted

if TYPE_CHECKING:
    from torch import Tensor


def transcode(stored: Tensor, spec: ModuleSpec, source: Layout, target: Layout) -> Tensor:
    """The codes tensor of ``target`` for codes that ``source`` stores as ``stored``.

    Neither layout may have a mask; codes of layouts with masks are unpacked instead (:meth:`Layout.pack`).

    Args:
        stored: codes tensor of ``source``, with the shape for ``spec``.
        spec: the module; ``target`` must be able to hold its shape.
        source: layout of ``stored``.
        target: layout to convert to.
    """
    if source is target or source.family == target.family:
        return stored
    if isinstance(source, WordLayout) and isinstance(target, WordLayout):
        return permuted(stored, spec, source, target)
    if isinstance(source, ByteLayout) and isinstance(target, ByteLayout):
        return target.from_bytes(source.to_bytes(stored))
    return target.pack_codes(source.unpack_codes(stored, spec), spec)
