"""Tensor layouts and the configs that describe them; importing it does not import torch."""

from __future__ import annotations

from marlinq.formats.format import FORMATS, Format, register_format
from marlinq.formats.layouts import (
    AWQ,
    GPTQ,
    LAYOUTS,
    ByteLayout,
    CompressedTensors,
    Layout,
    Marlin,
    ModuleSpec,
    TensorSpec,
    WordLayout,
    spec_of,
    transcode,
)
from marlinq.formats.stored import StoredWeight

for _form in (
    Format("gptq", "gptq", (GPTQ(1),)),
    Format("gptq-v2", "gptq", (GPTQ(2),)),
    Format("awq", "awq", (AWQ(),)),
    Format("marlin", "gptq", (Marlin(),)),
    Format("compressed-tensors", "compressed-tensors", (CompressedTensors(),)),
):
    register_format(_form)

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "ByteLayout",
    "Format",
    "Layout",
    "ModuleSpec",
    "StoredWeight",
    "TensorSpec",
    "WordLayout",
    "register_format",
    "spec_of",
    "transcode",
]
