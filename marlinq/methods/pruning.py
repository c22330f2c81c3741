"""Choose the weights to prune: as SparseGPT within GPTQ's sweep, or those of the smallest magnitude.

SparseGPT (Frantar and Alistarh 2023) prunes while it sweeps over the input channels. When a span of channels
is processed, their weights have the updates of all channels before, and those whose removal costs least are
pruned. Removing weight w of channel k costs w**2 / U[k, k]**2, where U is the upper root of the inverse
Hessian; that is (w R[k, k])**2 with the root R of the Hessian. Later channels compensate for a pruned weight
as for a rounding error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.core.sparsity import Sparsity

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pruning:
    """Pruning of a quantisation group while its channels are rounded.

    Attributes:
        sparsity: sparsity rule of the result.
        zeros: float32 [N], the group's zero points, which are the codes of pruned weights.
        diagonal: float32 [g], the diagonal of the Hessian's root.
    """

    sparsity: Sparsity
    zeros: Tensor
    diagonal: Tensor

    def part(self, rows: slice) -> Pruning:
        """The pruning of some of the group's channels."""
        return Pruning(self.sparsity, self.zeros, self.diagonal[rows])

    def halved(self, g: int) -> int:
        """Channels of the first half of g channels, a multiple of the span."""
        return g // 2 - g // 2 % self.sparsity.span

    def pruned(self, values: Tensor, first: int) -> Tensor:
        """bool [span, N], whether weights of a span are pruned.

        Args:
            values: weights of the span after the updates for all channels before, float32 [span, N], in code
                units.
            first: index of the span's first channel in :attr:`diagonal`.
        """
        diagonal = self.diagonal[first : first + self.sparsity.span]
        return ~self.sparsity.largest(_scores(values - self.zeros, diagonal))


def expected(updated: Tensor, diagonal: Tensor, sparsity: Sparsity | None) -> Tensor:
    """A group's weights with those that will probably be pruned set to zero; its scale is chosen from these.

    The final choice is made when each span is processed, after the updates inside the group.

    Args:
        updated: weights after the updates for all groups before, float32 [g, N].
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
    """Cost of removing each weight of ``values`` [channels, N]."""
    return (values * diagonal.unsqueeze(1)).square_()
