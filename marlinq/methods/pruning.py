"""Which weights are pruned: SparseGPT's choice inside the sweep of GPTQ, or the smallest magnitudes.

SparseGPT (Frantar and Alistarh 2023) prunes while it sweeps over the input channels: when a span of channels
comes up, their weights carry the updates of all channels before, and those whose removal costs least are
pruned. Removing weight w of channel k costs w**2 / U[k, k]**2, with U the upper root of the inverse Hessian,
which is (w R[k, k])**2 with the root R of the Hessian itself. What a pruned weight was moves on to the later
channels, as a rounding error does, so one sweep makes up for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.sparsity import Sparsity

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pruning:
    """How a quantisation group is pruned while its channels are rounded.

    Attributes:
        sparsity: weights of each span that are kept.
        zeros: float32 [N], the group's zero points: codes of pruned weights.
        diagonal: float32 [g], the diagonal of the Hessian's root.
    """

    sparsity: Sparsity
    zeros: Tensor
    diagonal: Tensor

    def part(self, rows: slice) -> Pruning:
        """The same for some of the group's channels."""
        return Pruning(self.sparsity, self.zeros, self.diagonal[rows])

    def halved(self, g: int) -> int:
        """Where g channels are halved: spans stay whole."""
        return g // 2 - g // 2 % self.sparsity.span

    def pruned(self, values: Tensor, first: int) -> Tensor:
        """bool [span, N]: what is pruned of the span whose turn it is.

        Args:
            values: float32 [span, N], in code units, with the updates of all channels before.
            first: the span's first channel among :attr:`diagonal`.
        """
        diagonal = self.diagonal[first : first + self.sparsity.span]
        return ~self.sparsity.largest(_scores(values - self.zeros, diagonal))


def expected(updated: Tensor, diagonal: Tensor, sparsity: Sparsity | None) -> Tensor:
    """The weights of a group as far as they will be kept: what its scale is chosen from.

    The choice is made again, with the updates inside the group, when each span comes up.

    Args:
        updated: float32 [g, N], with the updates of all groups before.
        diagonal: float32 [g], the diagonal of the Hessian's root.
        sparsity: None prunes nothing.
    """
    if sparsity is None:
        return updated
    return updated * sparsity.largest(_scores(updated, diagonal))


def smallest_removed(weight: Tensor, sparsity: Sparsity | None) -> Tensor:
    """float [N, K], ``weight`` with the smallest magnitudes of each span set to zero; None prunes nothing."""
    if sparsity is None:
        return weight
    return weight * sparsity.largest(weight.abs().t()).t()


def _scores(values: Tensor, diagonal: Tensor) -> Tensor:
    """What removing each weight of ``values`` [channels, N] costs."""
    return (values * diagonal.unsqueeze(1)).square_()
