"""Rotation of the residual stream: the same function with weights that lose less by quantisation."""

from __future__ import annotations

from marlinq.operations.rotate.operation import rotate
from marlinq.operations.rotate.report import RotationReport

__all__ = ["RotationReport", "rotate"]
