"""Conversion of a quantised checkpoint to another format: bit for bit the same weights, or a refusal with
its reason."""

from __future__ import annotations

from marlinq.operations.convert.conversion_report import ConversionReport
from marlinq.operations.convert.convert_checkpoint import convert

__all__ = ["ConversionReport", "convert"]
