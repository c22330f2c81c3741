"""Choose the operator that multiplies a quantised weight, with the reasons for and against each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from marlinq.core.errors import UsageError
from marlinq.formats import StoredWeight
from marlinq.runtime.operators import OPERATORS, Setting

AUTO = "auto"
"""Name that leaves the choice to estimated times."""

_ROWS = 1  # decoding one token is where operators differ most


@dataclass(frozen=True)
class OperatorCandidate:
    """An operator that was considered for a weight.

    Attributes:
        operator: name of the operator.
        takes: whether it can multiply with the weight.
        seconds: estimated seconds for one token; None where there is no estimate.
        reason: how it multiplies, or why it can't.
    """

    operator: str
    takes: bool
    seconds: float | None
    reason: str


@dataclass(frozen=True)
class Decision:
    """The operator chosen for one quantised weight, when its module is loaded.

    Attributes:
        chosen: the chosen operator.
        others: the operators that were not chosen.
        asked: whether the operator was requested by name.
    """

    chosen: OperatorCandidate
    others: tuple[OperatorCandidate, ...]
    asked: bool = False

    @property
    def operator(self) -> str:
        """The operator's name in :data:`marlinq.runtime.operators.OPERATORS`."""
        return self.chosen.operator

    @property
    def reason(self) -> str:
        """One line: how the chosen operator multiplies, and why not the others."""
        how = f"{self.chosen.reason}{', as asked' if self.asked else ''}"
        against = [f"not {other.operator}: {other.reason}" for other in self.others]
        return "; ".join((how, *against))


def decide(stored: StoredWeight, setting: Setting, *, operator: str = AUTO) -> Decision:
    """The operator for ``stored`` with the least estimated time for one token.

    Operators without an estimate come after those with one, in the order of registration.

    Args:
        stored: the weight.
        setting: device and dtype of the product.
        operator: name of the operator to prefer; another is chosen, with the reason, if it can't multiply.

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
    chosen = min(able, key=lambda one: float("inf") if one.seconds is None else one.seconds)
    return Decision(chosen, tuple(candidate for candidate in candidates if candidate is not chosen))


def require_operator(name: str) -> None:
    """Check that ``name`` is :data:`AUTO` or a registered operator's name.

    Raises:
        UsageError: any other name.
    """
    if name != AUTO and name not in OPERATORS:
        raise UsageError(f"operator: expected {AUTO}, {', '.join(OPERATORS)}, found {name!r}")


def _candidate(name: str, stored: StoredWeight, setting: Setting) -> OperatorCandidate:
    refusal = OPERATORS[name].refusal(stored, setting)
    if refusal is not None:
        return OperatorCandidate(name, False, None, refusal)
    estimate = OPERATORS[name].estimate(stored, setting, _ROWS)
    return OperatorCandidate(name, True, estimate.seconds, estimate.reason)


def summarize(decisions: Iterable[Decision]) -> list[str]:
    """One line for each distinct decision, with the number of its linears, most frequent first."""
    counts = Counter(decisions)
    return [
        f"{count} quantised linears: {decision.operator}: {decision.reason}"
        for decision, count in counts.most_common()
    ]
