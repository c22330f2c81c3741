"""The upper tail of a statistic, fitted to a sample and never lighter than the sample allows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_OF_TAIL = 200
"""Largest values of a sample that its tail is fitted to."""
_BOUND = 2.0
"""Standard errors that are added to every estimate, so that a small sample makes a cautious tail."""


@dataclass(frozen=True)
class Tail:
    """P(X > x) = share * exp(-(x - start) / spread) for x above ``start``.

    For a statistic X that grows with the logarithm of an error this is a power law in the error itself, and
    ``spread`` is Hill's estimator (Hill 1975) of the inverse of its exponent.
    """

    start: float
    share: float
    spread: float

    @classmethod
    def fit(cls, values: Tensor, total: int, *, floor: float, least_spread: float) -> Tail:
        """Fit the tail above ``floor``.

        Args:
            values: float [n], the observations above ``floor``, in any order; others may be left out.
            total: all observations, those below ``floor`` included.
            floor: see above; the tail starts here or, where there are many values, higher.
            least_spread: a lower bound of the spread.
        """
        count = min(len(values), LARGEST_OF_TAIL)
        start, spread = floor, least_spread
        if count:
            largest = values.topk(min(len(values), LARGEST_OF_TAIL + 1)).values.double()
            if len(values) > LARGEST_OF_TAIL:
                start = float(largest[-1])
            excess = float((largest[:count] - start).mean())
            spread = max(least_spread, excess * (1 + _BOUND / math.sqrt(count)))
        # An upper confidence bound of a Poisson mean: 3 where nothing was seen.
        most = count + _BOUND * math.sqrt(count) + 3
        return cls(start, min(1.0, most / max(total, 1)), spread)

    def log_chance(self, values: Tensor) -> Tensor:
        """ln P(X > x) for each x."""
        above = (values - self.start).clamp(min=0)
        return math.log(self.share) - above / self.spread


def tail_of_others(values: Tensor, *, share: float, least_spread: float) -> Tensor:
    """ln P of exceeding each value, by an exponential tail fitted to the other values of its row.

    Args:
        values: float [R, N], not negative.
        share: the largest of a row that make its tail, as a share of N.
        least_spread: as in :class:`Tail`.

    Returns:
        float [R, N].
    """
    columns = values.shape[1]
    count = min(max(2, round(share * columns)), LARGEST_OF_TAIL)
    start = values.topk(min(count + 1, columns), dim=1).values[:, -1:]
    excess = (values - start).clamp_(min=0)
    # Each value is judged by the others: it must not widen its own tail.
    spread = (excess.sum(dim=1, keepdim=True) - excess).div_(count - 1)
    spread = spread.mul_(1 + _BOUND / math.sqrt(count)).clamp_(min=least_spread)
    return excess.div_(spread).neg_().add_(math.log(min(1.0, (count + 1) / columns)))


def log_expected(log_chance: Tensor, tests: float) -> Tensor:
    """ln of how many of ``tests`` are expected to reach a chance given as its logarithm."""
    return log_chance + math.log(max(tests, 1))


def at_least(log_chance: Tensor, evidence: Tensor, alternatives: int) -> Tensor:
    """The larger of a fitted chance and the one of the noise model.

    If the noise is as modelled, a log-likelihood ratio L has E[exp L] <= 1, so P(L > x) <= exp(-x) for each
    of ``alternatives`` (Markov). A tail fitted to a calm sample must not promise more.
    """
    return torch.maximum(log_chance, math.log(alternatives) - evidence)
