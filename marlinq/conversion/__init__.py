"""Conversion between layouts: lossless bit for bit, or refused with the reason."""

from __future__ import annotations

from marlinq.conversion.operation import convert
from marlinq.conversion.report import ConversionReport, SkippedModule

__all__ = ["ConversionReport", "SkippedModule", "convert"]
