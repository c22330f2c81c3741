"""The values that an examination of the machine gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from marlinq.core.display import Block, Shown, Table


class State(StrEnum):
    """How a finding is to be read."""

    OK = "ok"
    ABSENT = "absent"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: thing that was examined, such as ``torch`` or ``NVRTC``.
        state: ok; absent, which is no fault by itself; or problem.
        found: observed state.
        fix: remedy, empty when nothing is wanted.
    """

    subject: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Capability:
    """One part of marlinq and whether it works here, with the reason."""

    name: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Diagnosis(Shown):
    """Everything that ``marlinq doctor`` reports."""

    findings: tuple[Finding, ...]
    capabilities: tuple[Capability, ...]
    ok: bool
    """Whether everything works that needs no GPU."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "capabilities": [asdict(capability) for capability in self.capabilities],
        }

    def display(self) -> list[Block]:
        """The findings with their fixes, then what works."""
        rows: list[tuple[str, ...]] = []
        for finding in self.findings:
            rows.append((str(finding.state), finding.subject, finding.found))
            if finding.fix:
                rows.append(("", "", f"fix: {finding.fix}"))
        able = tuple(("works" if c.works else "no", c.name, c.reason) for c in self.capabilities)
        return [Table((), tuple(rows), status=0), Table((), able, status=0)]
