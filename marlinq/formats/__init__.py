"""Tensor layouts and the configs that describe them; importing it does not import torch."""

from __future__ import annotations

from marlinq.formats.layouts import (
    LAYOUTS,
    Layout,
    ModuleSpec,
    TensorSpec,
    register_layout,
    spec_of,
    transcode,
)
from marlinq.formats.stored import StoredWeight

__all__ = [
    "LAYOUTS",
    "Layout",
    "ModuleSpec",
    "StoredWeight",
    "TensorSpec",
    "register_layout",
    "spec_of",
    "transcode",
]
