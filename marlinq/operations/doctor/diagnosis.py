"""The values that an examination of the machine gives."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """How a finding is to be read."""

    OK = "ok"
    ABSENT = "absent"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at, such as ``torch`` or ``NVRTC``.
        state: ok; absent, which is no fault by itself; or problem.
        found: what is there.
        fix: what to do about it, empty when nothing is wanted.
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
class Diagnosis:
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

    def render(self) -> str:
        """Text for a terminal: the findings with their fixes, then what works."""
        width = max(len(finding.subject) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.state:<8} {finding.subject:<{width}}  {finding.found}")
            if finding.fix:
                lines.append(f"{'':<8} {'':<{width}}  fix: {finding.fix}")
        lines.append("")
        lines += [f"{'works' if c.works else 'no':<8} {c.name}: {c.reason}" for c in self.capabilities]
        return "\n".join(lines)
