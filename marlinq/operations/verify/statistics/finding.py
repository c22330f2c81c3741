"""What an undamaged checkpoint would rarely show, and how rarely."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from marlinq.formats import ModuleSpec

WARNING = 1e-2
"""A single word is suspected where fewer as odd are expected in a run over undamaged weights."""
FAILURE = 1e-6
"""A check fails where fewer are expected, and more than a word speaks for it."""
MOST_SAY = 4.0
"""What one word, group or channel may add to a sum, so that the sum speaks for many of them."""


@dataclass(frozen=True)
class RunSize:
    """How much is tested in a run; expectations count over it."""

    weights: int
    groups: int

    @classmethod
    def of(cls, modules: Iterable[ModuleSpec]) -> RunSize:
        """All quantised modules of a checkpoint."""
        listed = list(modules)
        weights = sum(spec.in_features * spec.out_features for spec in listed)
        return cls(weights, sum(spec.groups * spec.out_features for spec in listed))


@dataclass(frozen=True)
class Finding:
    """A place where another explanation fits better.

    Attributes:
        what: the place and the explanation.
        evidence: the log-likelihood ratio, or a limited sum of them.
        expected: how many as strong as this an undamaged checkpoint of the run's size has on average.
        fails: False for a suspicion about one word or group.
    """

    what: str
    evidence: float
    expected: float
    fails: bool


def agreed(what: str, evidence: float, tests: float) -> Iterator[Finding]:
    """A failure, where a limited sum of log-likelihood ratios has an expectation below FAILURE."""
    expected = tests * math.exp(-min(max(evidence, 0.0), 700.0))
    if expected < FAILURE:
        yield Finding(what, evidence, expected, fails=True)
