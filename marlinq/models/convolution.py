"""Short convolutions over time: in front of a recurrent mixer, or between gates in the place of attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlinq.models.parts import Slices


@dataclass(frozen=True)
class GatedConvolution:
    """A short convolution between gates, in the place of attention (Liquid AI, "LFM2", 2025).

    The inputs have three parts: c is the one of index ``gate``, a and b are the others::

        output(c * convolution(a * b))

    Attributes:
        inputs: the three projections, of the same width.
        gate: index of the part that multiplies the convolution's result.
        convolution: full name of the depthwise convolution.
        taps: number of tokens that the convolution sees, the newest included.
        output: full name of the output projection.
    """

    inputs: Slices
    gate: int
    convolution: str
    taps: int
    output: str

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return self.inputs.widths[0]

    def parts(self, given: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(inputs of the convolution, gates behind it) from the three parts of the inputs."""
        first, second = (part for index, part in enumerate(given) if index != self.gate)
        return first * second, given[self.gate]

    def within(self, name: str) -> GatedConvolution:
        """This convolution with names relative to the parent of module ``name``."""
        return replace(
            self,
            inputs=self.inputs.within(name),
            convolution=f"{name}.{self.convolution}",
            output=f"{name}.{self.output}",
        )


def convolve(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The causal depthwise convolution of ``x`` [B, T, C], which follows ``before`` [B, taps - 1, C].

    Sums are float32 and rounded to the dtype of ``x`` once.

    Args:
        x: inputs.
        before: inputs of the tokens before.
        weight: float32 [C, taps]; the last tap is the newest token's.
        bias: float32 [C], added to the sums; or None.
    """
    tokens = x.shape[1]
    seen = torch.cat((before, x), 1).float()
    total = torch.zeros_like(seen[:, :tokens])
    for tap in range(weight.shape[1]):
        total += seen[:, tap : tap + tokens] * weight[:, tap]
    if bias is not None:
        total += bias
    return total.to(x.dtype)
