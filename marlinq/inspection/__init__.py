"""What a checkpoint holds, how large it is, and which kernels can run it."""

from __future__ import annotations

from marlinq.inspection.eligibility import Eligibility
from marlinq.inspection.operation import inspect
from marlinq.inspection.report import Inspection, ModuleFacts

__all__ = ["Eligibility", "Inspection", "ModuleFacts", "inspect"]
