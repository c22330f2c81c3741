"""Proving that a quantised checkpoint is what it says, and finding what is wrong where it is not."""

from __future__ import annotations

from marlinq.verification.operation import verify
from marlinq.verification.report import Check, ModuleResult, VerificationReport

__all__ = ["Check", "ModuleResult", "VerificationReport", "verify"]
