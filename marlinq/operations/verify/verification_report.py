"""The report of ``verify``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from marlinq.core.display import Block, Shown, Table, counted, lines

MANIFEST_CHECK = "manifest"
"""Name of the row about the hashes of all tensors."""
Status = Literal["passed", "warning", "failed", "skipped"]

_SHOWN_PROBLEMS = 5
_SHOWN_MODULES = 10


@dataclass(frozen=True)
class Check:
    """One row of the report.

    Attributes:
        name: name of the check.
        status: ``passed``, ``warning`` (odd but loadable), ``failed``, or ``skipped`` (``detail`` says why).
        detail: one line.
        problems: one line for each problem behind ``failed`` or ``warning``, naming its tensor or module.
    """

    name: str
    status: Status
    detail: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModuleResult:
    """One quantised module.

    Attributes:
        name: full module name.
        in_features, out_features: K and N.
        group_size: input channels per scale, as :attr:`marlinq.core.granularity.Granularity.size`.
        symmetric: whether zero points are the middle code.
        relative_error: ||W - dq|| / ||W|| against the original; None without one.
        rtn_error: error of round-to-nearest of the original, with the same groups and symmetry.
        problems: one line for each problem that a check found in this module.
    """

    name: str
    in_features: int
    out_features: int
    group_size: int | str
    symmetric: bool
    relative_error: float | None = None
    rtn_error: float | None = None
    problems: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Relative error over round-to-nearest's; None where either is unknown or zero."""
        if self.relative_error is None or not self.rtn_error:
            return None
        return self.relative_error / self.rtn_error


@dataclass(frozen=True)
class VerificationReport(Shown):
    """The results of all checks.

    Attributes:
        checkpoint: path of the folder.
        against: path of the folder that it was compared with, or None.
        format: format of the checkpoint; None if it can't be recognised.
        checks: the rows, in the order in which they were made.
        modules: every quantised module, worst first.
    """

    checkpoint: str
    against: str | None
    format: str | None
    checks: tuple[Check, ...]
    modules: tuple[ModuleResult, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether no check failed; warnings and skipped rows don't count."""
        return all(check.status != "failed" for check in self.checks)

    @property
    def warnings(self) -> int:
        """Number of problems in checks with the status ``warning``."""
        return sum(max(1, len(check.problems)) for check in self.checks if check.status == "warning")

    @property
    def structure_only(self) -> bool:
        """Whether values of tensors were compared with nothing: there is neither manifest nor original."""
        hashed = any(check.name == MANIFEST_CHECK and check.status == "passed" for check in self.checks)
        return self.against is None and not hashed

    @property
    def verdict(self) -> str:
        """The last line: ``verified``, ``verified: structure only``, either with ``, N warnings``, or
        ``FAILED: N of M checks``."""
        if not self.ok:
            failed = sum(check.status == "failed" for check in self.checks)
            return f"FAILED: {failed} of {len(self.checks)} checks"
        noun = "warning" if self.warnings == 1 else "warnings"
        scope = "verified: structure only" if self.structure_only else "verified"
        return f"{scope}, {self.warnings} {noun}" if self.warnings else scope

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        modules = [asdict(module) | {"ratio": module.ratio} for module in self.modules]
        return {
            "ok": self.ok,
            "verdict": self.verdict,
            "structure_only": self.structure_only,
            "checkpoint": self.checkpoint,
            "against": self.against,
            "format": self.format,
            "checks": [asdict(check) for check in self.checks],
            "modules": modules,
        }

    def display(self) -> list[Block]:
        """The checks, the worst modules when there was an original, and the verdict."""
        title = f"{self.checkpoint} ({self.format or 'unknown format'})"
        rows: list[tuple[str, ...]] = []
        for check in self.checks:
            rows.append((check.status, check.name, check.detail))
            # A single problem is already in the detail line.
            if len(check.problems) > 1:
                rows += [("", "", f"- {problem}") for problem in check.problems[:_SHOWN_PROBLEMS]]
                rest = len(check.problems) - _SHOWN_PROBLEMS
                rows += [("", "", f"- and {rest} more (--json lists all)")] if rest > 0 else []
        return [
            lines(title + (f" against {self.against}" if self.against else "")),
            Table((), tuple(rows), status=0),
            *_module_table(self.modules),
            lines(self.verdict),
        ]


def _module_table(modules: Sequence[ModuleResult]) -> list[Block]:
    """A table of the modules with the largest errors, beside round-to-nearest's."""
    shown = [module for module in modules if module.relative_error is not None][:_SHOWN_MODULES]
    if not shown:
        return []
    rows = [
        (
            module.name,
            str(module.in_features),
            str(module.out_features),
            str(module.group_size),
            f"{module.relative_error:.5f}",
            "-" if module.ratio is None else f"{module.ratio:.2f}x",
        )
        for module in shown
    ]
    header = ("module (worst first)", "K", "N", "group", "error", "of RTN's")
    more = [lines(f"and {len(modules) - len(shown)} more")] if len(modules) > len(shown) else []
    return [Table(header, tuple(rows), numbers=(1, 2, 3, 4, 5)), *more]


@dataclass
class Findings:
    """Problems and warnings of one check while it runs; becomes a :class:`Check`."""

    name: str
    failures: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    skipped: str | None = None

    def result(self, summary: str) -> Check:
        """The row: ``summary`` if there is no problem, else the numbers of problems and the first."""
        if self.skipped is not None and not self.failures:
            return Check(self.name, "skipped", self.skipped)
        sentences = self.failures or self.warnings
        if not sentences:
            return Check(self.name, "passed", summary)
        more = f" and {counted(len(self.warnings), 'warnings')}" if self.failures and self.warnings else ""
        detail = f"{counted(len(sentences), 'problems')}{more}; first: {sentences[0]}"
        if len(sentences) == 1 and not more:
            detail = sentences[0]
        status: Status = "failed" if self.failures else "warning"
        return Check(self.name, status, detail, (*self.failures, *self.warnings))
