"""Tensor layouts and the configs that describe them; importing it does not import torch."""

from __future__ import annotations

from marlinq.formats.layouts import (
    LAYOUTS,
    ByteLayout,
    Layout,
    ModuleSpec,
    TensorSpec,
    WordLayout,
    register_layout,
    spec_of,
    transcode,
)
from marlinq.formats.stored import StoredWeight

__all__ = [
    "LAYOUTS",
    "ByteLayout",
    "Layout",
    "ModuleSpec",
    "StoredWeight",
    "TensorSpec",
    "WordLayout",
    "register_layout",
    "spec_of",
    "transcode",
]
