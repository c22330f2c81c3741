"""The result of an examination of the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from marlinq.core.display import Block, Shown, Table


class State(StrEnum):
    """Whether an examined thing works, is absent (no fault by itself), or needs a fix."""

    OK = "ok"
    ABSENT = "absent"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The state of one examined thing.

    Attributes:
        subject: the thing, such as ``torch`` or ``NVRTC``.
        state: whether it works.
        found: observation, such as a version.
        fix: advice; empty when nothing is to be done.
    """

    subject: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Capability:
    """One part of marlinq, whether it works on this machine, and why."""

    name: str
    works: bool
    reason: str


@dataclass(frozen=True)
class Diagnosis(Shown):
    """The full report of ``marlinq doctor``."""

    findings: tuple[Finding, ...]
    capabilities: tuple[Capability, ...]
    ok: bool
    """Whether everything that needs no GPU works."""

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
