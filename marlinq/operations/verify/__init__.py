"""The operation behind ``marlinq verify``: checks a quantised checkpoint and locates damage in it."""

from __future__ import annotations

from marlinq.operations.verify.verification_report import Check, ModuleResult, VerificationReport
from marlinq.operations.verify.verify_checkpoint import verify

__all__ = ["Check", "ModuleResult", "VerificationReport", "verify"]
