"""Weight formats of the kernels: order of the codes in words, kind of scales, value of a code."""

from __future__ import annotations

from marlinq.kernels.contract.weight_formats.e2m1 import E2M1
from marlinq.kernels.contract.weight_formats.e4m3 import E4M3
from marlinq.kernels.contract.weight_formats.int4 import INT4
from marlinq.kernels.contract.weight_formats.int4_sparse import INT4_SPARSE
from marlinq.kernels.contract.weight_formats.int8 import INT8
from marlinq.kernels.contract.weight_formats.weight_format import (
    WEIGHT_FORMATS,
    ScaleKind,
    WeightFormat,
    register_weight_format,
)

__all__ = [
    "E2M1",
    "E4M3",
    "INT4",
    "INT4_SPARSE",
    "INT8",
    "WEIGHT_FORMATS",
    "ScaleKind",
    "WeightFormat",
    "register_weight_format",
]
