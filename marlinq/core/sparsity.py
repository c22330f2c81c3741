"""Structured sparsity: in each span of neighbouring input channels, at most some weights are not zero.

Spans belong to one output channel and begin at multiples of their length along K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


@dataclass(frozen=True)
class Sparsity:
    """At most ``kept`` of ``span`` neighbouring weights of an output channel are not zero.

    Attributes:
        kept: weights of a span that may have a value.
        span: input channels of a span.
    """

    kept: int
    span: int

    @property
    def name(self) -> str:
        """Name in recipes, configs and on the command line: ``2:4``."""
        return f"{self.kept}:{self.span}"

    def describe(self) -> str:
        """Text for messages: ``2:4 sparse``."""
        return f"{self.name} sparse"

    def largest(self, scores: Tensor) -> Tensor:
        """The weights of every span with the largest scores; of equal ones, those of the lower channels.

        Args:
            scores: float [K, ...]; K is a multiple of the span.

        Returns:
            bool, of the same shape: exactly ``kept`` of each span.
        """
        spans = scores.reshape(-1, self.span, *scores.shape[1:])
        places = spans.unbind(1)
        kept = []
        for place, own in enumerate(places):
            before = [other >= own for other in places[:place]]
            behind = [other > own for other in places[place + 1 :]]
            rank = torch.stack(before + behind).sum(dim=0, dtype=torch.uint8)
            kept.append(rank < self.kept)
        return torch.stack(kept, dim=1).reshape(scores.shape)

    def crowded(self, used: Tensor) -> Tensor:
        """bool [K / span, N], whether a span has more nonzero weights than ``kept``.

        Args:
            used: bool [K, N], true where a weight is not zero.
        """
        counts = used.reshape(-1, self.span, *used.shape[1:]).sum(dim=1, dtype=torch.uint8)
        return counts > self.kept

    def refusal(self, used: Tensor) -> str | None:
        """Why weights that are nonzero at ``used``, bool [K, N], break this rule, in one clause; None if they
        don't."""
        if used.shape[0] % self.span:
            return f"K={used.shape[0]} is not a multiple of {self.span}"
        crowded = self.crowded(used)
        count = int(crowded.sum())
        if count == 0:
            return None
        span, column = divmod(int(crowded.flatten().to(torch.uint8).argmax()), crowded.shape[1])
        return (
            f"{count} of {crowded.numel()} spans of {self.span} input channels have more than {self.kept} "
            f"weights, first output channel {column} at input channel {span * self.span}"
        )


TWO_OF_FOUR = Sparsity(2, 4)
"""The sparsity that tensor cores of compute capability 8.0 and later multiply with."""

SPARSITIES: dict[str, Sparsity] = {TWO_OF_FOUR.name: TWO_OF_FOUR}
"""Every sparsity by name."""
