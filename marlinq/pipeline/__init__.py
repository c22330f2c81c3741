"""The quantise operation: block by block, with a journal, resumable."""

from __future__ import annotations

from marlinq.pipeline.operation import quantize
from marlinq.pipeline.report import ModuleReport, QuantizeReport

__all__ = ["ModuleReport", "QuantizeReport", "quantize"]
