"""Conversion of a quantised checkpoint to another format: bit for bit the same weights, or a refusal with
its reason."""

from __future__ import annotations

from marlinq.operations.convert.operation import convert
from marlinq.operations.convert.report import ConversionReport

__all__ = ["ConversionReport", "convert"]
