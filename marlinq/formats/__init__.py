"""Tensor layouts, and the dialects of ``quantization_config`` that describe them; importing it imports no
torch."""

from __future__ import annotations

from marlinq.formats.format import FORMATS, Format, register_format
from marlinq.formats.layouts import (
    AWQ,
    COMPRESSED_24,
    COMPRESSED_FLOATS,
    COMPRESSED_MXFP4,
    DEEPSEEK_V4,
    GPTQ,
    GPTQ_24,
    GPTQMODEL_FP8,
    HUGGING_FACE_FP8,
    LAYOUTS,
    MODELOPT,
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

_COMPRESSED_INTEGERS = CompressedTensors()

for _form in (
    Format("gptq", "gptq", (GPTQ(1),)),
    Format("gptq-v2", "gptq", (GPTQ(2),)),
    Format("awq", "awq", (AWQ(),)),
    Format("marlin", "gptq", (Marlin(),)),
    Format("compressed-tensors", "compressed-tensors", (_COMPRESSED_INTEGERS, *COMPRESSED_FLOATS)),
    # Linears that are quantised but not sparse are stored like those of any compressed-tensors checkpoint.
    Format("marlin-24", "compressed-tensors", (COMPRESSED_24, _COMPRESSED_INTEGERS)),
    Format("gptq-marlin-24", "gptq", (GPTQ_24,)),
    Format("fp8", "fp8", HUGGING_FACE_FP8),
    Format("deepseek-v4", "fp8", DEEPSEEK_V4),
    Format("modelopt", "modelopt", MODELOPT),
    Format("gpt-oss", "mxfp4", (COMPRESSED_MXFP4,), stacked=True),
    Format(
        "gptqmodel-fp8",
        "fp8",
        (GPTQMODEL_FP8,),
        read_only="its scales divide, which other loaders of the same tensor names don't know; use fp8",
    ),
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
