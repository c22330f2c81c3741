"""Fits the upper tail of a statistic to a sample, with upper confidence bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_OF_TAIL = 200
"""number of the largest values that a tail is fitted to"""
_BOUND = 2.0
"""standard errors added to every estimate, so that a small sample gives a heavy tail"""


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
        """Fits the tail above ``floor``.

        Args:
            values: float [n], all observations above ``floor``, in any order.
            total: number of all observations, with those below ``floor``.
            floor: least start of the tail; it starts higher if there are many values.
            least_spread: lower bound of the spread.
        """
        count = min(len(values), LARGEST_OF_TAIL)
        start, spread = floor, least_spread
        if count:
            largest = values.topk(min(len(values), LARGEST_OF_TAIL + 1)).values.double()
            if len(values) > LARGEST_OF_TAIL:
                start = float(largest[-1])
            excess = float((largest[:count] - start).mean())
            spread = max(least_spread, excess * (1 + _BOUND / math.sqrt(count)))
        # Upper confidence bound of a Poisson mean; 3 for a count of 0.
        most = count + _BOUND * math.sqrt(count) + 3
        return cls(start, min(1.0, most / max(total, 1)), spread)

    def log_chance(self, values: Tensor) -> Tensor:
        """ln P(X > x) for each x."""
        above = (values - self.start).clamp(min=0)
        return math.log(self.share) - above / self.spread


def tail_of_others(values: Tensor, *, share: float, least_spread: float) -> Tensor:
    """ln of the probability of exceeding each value, from an exponential tail of the other values in its row.

    Args:
        values: float [R, N], not negative.
        share: share of N whose largest values form the tail.
        least_spread: lower bound of the spread.

    Returns:
        float [R, N].
    """
    columns = values.shape[1]
    count = min(max(2, round(share * columns)), LARGEST_OF_TAIL)
    start = values.topk(min(count + 1, columns), dim=1).values[:, -1:]
    excess = (values - start).clamp_(min=0)
    # The value itself is left out, since it would widen its own tail.
    spread = (excess.sum(dim=1, keepdim=True) - excess).div_(count - 1)
    spread = spread.mul_(1 + _BOUND / math.sqrt(count)).clamp_(min=least_spread)
    return excess.div_(spread).neg_().add_(math.log(min(1.0, (count + 1) / columns)))


def log_expected(log_chance: Tensor, tests: float) -> Tensor:
    """ln of the expected number of ``tests`` that reach a probability given as its logarithm."""
    return log_chance + math.log(max(tests, 1))


def at_least(log_chance: Tensor, evidence: Tensor, alternatives: int) -> Tensor:
    """The larger of a fitted probability and the bound of the noise model, both as logarithms.

    If the noise follows its model, a log-likelihood ratio L has E[exp L] <= 1, so P(L > x) <= exp(-x) for
    each of ``alternatives`` (Markov). A fitted tail may not claim less than this bound.
    """
    return torch.maximum(log_chance, math.log(alternatives) - evidence)
