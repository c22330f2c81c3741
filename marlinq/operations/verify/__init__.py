"""The operation behind ``marlinq verify``: checks a quantised checkpoint and locates damage in it."""

from __future__ import annotations

from marlinq.operations.verify.operation import verify
from marlinq.operations.verify.report import Check, ModuleResult, VerificationReport

__all__ = ["Check", "ModuleResult", "VerificationReport", "verify"]
