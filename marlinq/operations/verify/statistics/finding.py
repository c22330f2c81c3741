"""Findings: observations that are improbable in an undamaged checkpoint, with their probability."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from marlinq.formats import ModuleSpec

WARNING = 1e-2
"""Number of equally odd observations expected in a run over undamaged weights below which one is a
warning."""
FAILURE = 1e-6
"""Expectation below which a check fails, if more than one word supports it."""
MOST_SAY = 4.0
"""Largest log-likelihood ratio that one word, group or channel adds to a sum, so that a large sum needs many
of them."""


@dataclass(frozen=True)
class RunSize:
    """Numbers of weights, words and groups in a run, over which expected numbers are counted."""

    weights: int
    groups: int

    @classmethod
    def of(cls, modules: Iterable[ModuleSpec]) -> RunSize:
        """All quantised modules of a checkpoint."""
        listed = list(modules)
        weights = sum(spec.in_features * spec.out_features for spec in listed)
        return cls(weights, sum(spec.groups * spec.out_features for spec in listed))


@dataclass(frozen=True)
class SuspectPlace:
    """A place where another explanation fits better than the stored values.

    Attributes:
        what: the place and the explanation.
        evidence: log-likelihood ratio, or a sum of limited ones.
        expected: mean number of findings at least this strong in an undamaged checkpoint of this size.
        fails: whether the check fails; False for a warning about one word or group.
    """

    what: str
    evidence: float
    expected: float
    fails: bool


def agreed(what: str, evidence: float, tests: float) -> Iterator[SuspectPlace]:
    """A failure, if a sum of limited log-likelihood ratios is expected less often than FAILURE."""
    expected = tests * math.exp(-min(max(evidence, 0.0), 700.0))
    if expected < FAILURE:
        yield SuspectPlace(what, evidence, expected, fails=True)
