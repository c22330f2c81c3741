"""Every tensor layout, one file each, and the registry that the rest of the program finds them in."""

from __future__ import annotations

from marlinq.formats.layouts.awq import AWQ
from marlinq.formats.layouts.base import Layout, ModuleSpec, TensorSpec, spec_of
from marlinq.formats.layouts.byte_codes import ByteLayout
from marlinq.formats.layouts.compressed_tensors import CompressedTensors
from marlinq.formats.layouts.gptq import GPTQ
from marlinq.formats.layouts.marlin import Marlin
from marlinq.formats.layouts.transcoding import transcode
from marlinq.formats.layouts.words import WordLayout

LAYOUTS: dict[str, Layout] = {}
"""Every layout by its name."""


def register_layout(layout: Layout) -> Layout:
    """Make ``layout`` known by its name; :func:`marlinq.formats.register_format` does it; returns it."""
    LAYOUTS[layout.name] = layout
    return layout


__all__ = [
    "AWQ",
    "GPTQ",
    "LAYOUTS",
    "ByteLayout",
    "CompressedTensors",
    "Layout",
    "Marlin",
    "ModuleSpec",
    "TensorSpec",
    "WordLayout",
    "register_layout",
    "spec_of",
    "transcode",
]
