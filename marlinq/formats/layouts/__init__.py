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
"""Every layout by its command-line name."""


def register_layout(layout: Layout) -> Layout:
    """Make ``layout`` known to every command by its name; returns it."""
    LAYOUTS[layout.name] = layout
    return layout


for _layout in (GPTQ(1), GPTQ(2), AWQ(), Marlin(), CompressedTensors()):
    register_layout(_layout)

__all__ = [
    "LAYOUTS",
    "ByteLayout",
    "Layout",
    "ModuleSpec",
    "TensorSpec",
    "WordLayout",
    "register_layout",
    "spec_of",
    "transcode",
]
