"""The operation behind ``marlinq rotate``: rotates the residual stream, so that quantisation loses less."""

from __future__ import annotations

from marlinq.operations.rotate.rotate_model import rotate
from marlinq.operations.rotate.rotation_report import RotationReport

__all__ = ["RotationReport", "rotate"]
