"""What a checkpoint holds, how large it is, and which kernels can run it."""

from __future__ import annotations

from marlinq.operations.inspect.eligibility import Eligibility
from marlinq.operations.inspect.operation import inspect
from marlinq.operations.inspect.report import Inspection, ModuleFacts

__all__ = ["Eligibility", "Inspection", "ModuleFacts", "inspect"]
