"""Names of tensor dtypes, as torch spells them without its prefix: ``float16``, ``int32``.

Descriptions of tensors hold names of dtypes, so that they can be read and compared without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
else:
    from marlinq.core.lazy import torch

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by the dtype's name."""

FLOATS = ("float32", "bfloat16", "float16")
"""Dtypes of unquantised weights."""

SCALES = (*FLOATS, "float8_e4m3fn", "float8_e8m0fnu")
"""Dtypes of scales; ``float8_e8m0fnu`` holds powers of two without a sign."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``name``."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype``: ``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of the floating-point dtype ``narrow`` is one of ``wide``."""
    outer, inner = torch.finfo(wide), torch.finfo(narrow)
    smallest = (outer.tiny * outer.eps, inner.tiny * inner.eps)
    return outer.eps <= inner.eps and outer.max >= inner.max and smallest[0] <= smallest[1]
