"""Pure tensor maths of every supported 4-bit layout, all through one neutral tuple."""

from __future__ import annotations

from marlinq.core.weight import Grid, QuantizedTensor, group_count, symmetric_zero, trivial_g_idx
from marlinq.formats.layouts.awq import AWQ
from marlinq.formats.layouts.base import Format, ModuleSpec, TensorSpec, spec_of, transcode
from marlinq.formats.layouts.compressed_tensors import CompressedTensors
from marlinq.formats.layouts.gptq import GPTQ
from marlinq.formats.layouts.marlin import Marlin

FORMATS: dict[str, Format] = {
    layout.name: layout for layout in (GPTQ(1), GPTQ(2), AWQ(), Marlin(), CompressedTensors())
}
"""Every layout by its command-line name: gptq, gptq-v2, awq, marlin, compressed-tensors."""

__all__ = [
    "FORMATS",
    "Format",
    "Grid",
    "ModuleSpec",
    "QuantizedTensor",
    "TensorSpec",
    "group_count",
    "spec_of",
    "symmetric_zero",
    "transcode",
    "trivial_g_idx",
]
