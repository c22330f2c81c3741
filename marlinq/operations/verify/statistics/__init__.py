"""Statistics of codes, scales and zero points against the original weights; docs/verify.md explains them."""

from __future__ import annotations

from marlinq.operations.verify.statistics.float_weights import find_float_faults

__all__ = ["find_float_faults"]
