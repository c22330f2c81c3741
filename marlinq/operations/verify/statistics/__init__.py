"""Statistics of codes, scales and zero points against the original weights; docs/verify.md explains them."""

from __future__ import annotations

from marlinq.operations.verify.statistics.evidence import Evidence, find_faults
from marlinq.operations.verify.statistics.finding import RunSize, SuspectPlace
from marlinq.operations.verify.statistics.float_weights import find_float_faults

__all__ = ["Evidence", "RunSize", "SuspectPlace", "find_faults", "find_float_faults"]
