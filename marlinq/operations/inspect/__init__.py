"""The operation behind ``marlinq inspect``: contents and size of a checkpoint, and which servers load it."""

from __future__ import annotations

from marlinq.operations.inspect.eligibility import ServerVerdict
from marlinq.operations.inspect.inspect_checkpoint import inspect
from marlinq.operations.inspect.inspection import Inspection

__all__ = ["Inspection", "ServerVerdict", "inspect"]
