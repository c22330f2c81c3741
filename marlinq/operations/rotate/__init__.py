"""The operation behind ``marlinq rotate``: rotates the residual stream, so that quantisation loses less."""

from __future__ import annotations

from marlinq.operations.rotate.operation import rotate
from marlinq.operations.rotate.report import RotationReport

__all__ = ["RotationReport", "rotate"]
