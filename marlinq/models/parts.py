"""Descriptions shared by attention, recurrent mixers and MLPs: norms, and columns of joined projections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last axis, computed in float32.

    Attributes:
        module: full name of the module; its ``weight`` and ``bias`` are parameters where it has them.
        kind: ``rms`` divides by the root of the mean square; ``layer`` subtracts the mean first.
        eps: number added to the mean square or the variance.
        offset: number added to the weight: 1 where a model stores ``weight - 1``.
        narrow_first: whether the normalised value is rounded to the activations' dtype before it is
            multiplied by the weight (Llama) and not after (Gemma).
        width: number of channels that are normalised together; for query and key norms that of a head, or
            of all heads.
    """

    module: str
    kind: Literal["rms", "layer"]
    eps: float
    offset: float = 0.0
    narrow_first: bool = True
    width: int = 0


@dataclass(frozen=True)
class Slices:
    """Positions of several projections' outputs (q, k, v or gate, up) in the outputs of one or more linears.

    Attributes:
        modules: full names of the linears; a single one where the model fuses them.
        widths: output columns of each projection, in order.
        turns: number of equal runs in the concatenated columns of all modules, each of which holds a share of
            every projection. 1 where the projections follow each other; the number of heads in GPT-NeoX,
            which keeps q, k and v of a head together.
    """

    modules: tuple[str, ...]
    widths: tuple[int, ...]
    turns: int = 1

    def split(self, joined: Tensor) -> list[Tensor]:
        """The projections' outputs, [..., width] each, from the modules' concatenated outputs."""
        if self.turns == 1:
            return list(torch.split(joined, list(self.widths), -1))
        runs = joined.reshape(*joined.shape[:-1], self.turns, -1)
        parts = torch.split(runs, [width // self.turns for width in self.widths], -1)
        return [part.flatten(-2) for part in parts]

    def within(self, name: str) -> Slices:
        """These positions with names relative to the parent of module ``name``."""
        return replace(self, modules=tuple(f"{name}.{each}" for each in self.modules))
