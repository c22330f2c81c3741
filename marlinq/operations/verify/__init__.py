"""Proving that a quantised checkpoint is what it says, and finding what is wrong where it is not."""

from __future__ import annotations

from marlinq.operations.verify.operation import verify
from marlinq.operations.verify.report import Check, ModuleResult, VerificationReport

__all__ = ["Check", "ModuleResult", "VerificationReport", "verify"]
