"""Conversion between layouts: lossless bit for bit, or refused with the reason."""

from __future__ import annotations

from marlinq.operations.convert.operation import convert
from marlinq.operations.convert.report import ConversionReport

__all__ = ["ConversionReport", "convert"]
