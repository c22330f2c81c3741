"""Tensor layouts, one file each, and their registry."""

from __future__ import annotations

from marlinq.formats.layouts.awq import AWQ
from marlinq.formats.layouts.byte_codes import ByteLayout
from marlinq.formats.layouts.compressed_tensors import CompressedTensors
from marlinq.formats.layouts.floats import (
    COMPRESSED_FLOATS,
    COMPRESSED_MXFP4,
    DEEPSEEK_V4,
    GPTQMODEL_FP8,
    HUGGING_FACE_FP8,
    MODELOPT,
)
from marlinq.formats.layouts.gptq import GPTQ
from marlinq.formats.layouts.layout import Layout, ModuleSpec, TensorSpec, spec_of
from marlinq.formats.layouts.marlin import Marlin
from marlinq.formats.layouts.marlin_24 import COMPRESSED_24, GPTQ_24
from marlinq.formats.layouts.transcoding import transcode
from marlinq.formats.layouts.words import WordLayout

LAYOUTS: dict[str, Layout] = {}
"""Every layout by its name."""


def register_layout(layout: Layout) -> Layout:
    """Make ``layout`` known by its name; returns it. :func:`marlinq.formats.register_format` calls it."""
    LAYOUTS[layout.name] = layout
    return layout


__all__ = [
    "AWQ",
    "COMPRESSED_24",
    "COMPRESSED_FLOATS",
    "COMPRESSED_MXFP4",
    "DEEPSEEK_V4",
    "GPTQ",
    "GPTQMODEL_FP8",
    "GPTQ_24",
    "HUGGING_FACE_FP8",
    "LAYOUTS",
    "MODELOPT",
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
