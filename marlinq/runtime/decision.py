"""Which operator multiplies a quantised weight, why, and why not the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from marlinq.core.errors import UsageError
from marlinq.formats import StoredWeight
from marlinq.runtime.operators import OPERATORS, Setting

AUTO = "auto"
"""Let the expected times choose."""

_ROWS = 1  # decoding one token is where operators differ most


@dataclass(frozen=True)
class Candidate:
    """What came of one operator.

    Attributes:
        operator: its name.
        takes: whether it could multiply with the weight.
        seconds: the expected time for one token; None where nobody knows it.
        reason: how it would multiply, or why it can't.
    """

    operator: str
    takes: bool
    seconds: float | None
    reason: str


@dataclass(frozen=True)
class Decision:
    """What multiplies one quantised weight; bound at load.

    Attributes:
        chosen: the operator.
        others: the operators that were not taken.
        asked: the operator was asked for by name.
    """

    chosen: Candidate
    others: tuple[Candidate, ...]
    asked: bool = False

    @property
    def operator(self) -> str:
        """The operator's name in :data:`marlinq.runtime.operators.OPERATORS`."""
        return self.chosen.operator

    @property
    def reason(self) -> str:
        """Why it was chosen, in one line: what it does, and why not the others."""
        how = f"{self.chosen.reason}{', as asked' if self.asked else ''}"
        against = [f"not {other.operator}: {other.reason}" for other in self.others]
        return "; ".join((how, *against))


def decide(stored: StoredWeight, setting: Setting, *, operator: str = AUTO) -> Decision:
    """The operator for ``stored``: of those that take it the one that is expected to be fastest at one token.

    Operators whose time nobody knows come behind those with one, in the order of registration.

    Args:
        stored: the weight.
        setting: where it is multiplied.
        operator: the name of one that is taken if it can; another is taken, with the reason, if it can't.

    Raises:
        UsageError: no operator has that name.
        EnvironmentProblem: the operator fits, but a package is missing that the user can install.
    """
    require_operator(operator)
    if operator != AUTO:
        asked = _candidate(operator, stored, setting)
        if asked.takes:
            return Decision(asked, (), asked=True)
    names = [
        name
        for name, each in OPERATORS.items()
        if name == operator or (each.serves(setting.device) and each.knows(stored))
    ]
    candidates = [_candidate(name, stored, setting) for name in names]
    able = [candidate for candidate in candidates if candidate.takes]
    # min keeps the first of equals.
    chosen = min(able, key=lambda found: float("inf") if found.seconds is None else found.seconds)
    return Decision(chosen, tuple(candidate for candidate in candidates if candidate is not chosen))


def require_operator(name: str) -> None:
    """Accepts :data:`AUTO` and every registered operator's name.

    Raises:
        UsageError: any other name.
    """
    if name != AUTO and name not in OPERATORS:
        raise UsageError(f"operator: expected {AUTO}, {', '.join(OPERATORS)}, found {name!r}")


def _candidate(name: str, stored: StoredWeight, setting: Setting) -> Candidate:
    refusal = OPERATORS[name].refusal(stored, setting)
    if refusal is not None:
        return Candidate(name, False, None, refusal)
    found = OPERATORS[name].estimate(stored, setting, _ROWS)
    return Candidate(name, True, found.seconds, found.reason)


def summarize(decisions: Iterable[Decision]) -> list[str]:
    """One line for each different decision with the number of linears that it holds for, most first."""
    counts = Counter(decisions)
    return [
        f"{count} quantised linears: {decision.operator}: {decision.reason}"
        for decision, count in counts.most_common()
    ]
