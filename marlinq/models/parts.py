"""What attention, delta nets and MLPs are all described with: norms, and columns of joined projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last axis, computed in float32.

    Attributes:
        module: full name of the module; its ``weight`` and ``bias`` are parameters where it has them.
        kind: ``rms`` divides by the root of the mean square; ``layer`` subtracts the mean first.
        eps: added to the mean square or the variance.
        offset: added to the weight: 1 where a model stores ``weight - 1``.
        narrow_first: whether the normalised value is rounded to the activations' dtype before it is
            multiplied with the weight (Llama), instead of after (Gemma).
        width: channels that are normalised together; of a query or key norm the head's width, or that of
            all heads.
    """

    module: str
    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0
    narrow_first: bool = True
    width: int = 0


@dataclass(frozen=True)
class Slices:
    """Where the outputs of several projections come from.

    Attributes:
        modules: full names of the linears; a single one where the model fuses them.
        widths: output columns of each part, in the order of the executor's parts (q, k, v or gate, up).
        turns: the columns of all modules, side by side, are this many runs of equal length, and each run
            holds its share of every part. 1 where the parts lie one behind the other; GPT-NeoX keeps q, k
            and v of one head together.
    """

    modules: tuple[str, ...]
    widths: tuple[int, ...]
    turns: int = 1

    def split(self, joined: Tensor) -> list[Tensor]:
        """The parts, each [..., width], of the outputs of all modules side by side [..., sum of widths]."""
        if self.turns == 1:
            return list(torch.split(joined, list(self.widths), -1))
        runs = joined.reshape(*joined.shape[:-1], self.turns, -1)
        parts = torch.split(runs, [width // self.turns for width in self.widths], -1)
        return [part.flatten(-2) for part in parts]
