"""Shape and types of one product, for which a kernel is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.instantiation import Parameters
from marlinq.kernels.contract.weight_formats import WeightFormat

GRANULARITIES = (*map(Granularity.group, (16, 32, 64, 128)), Granularity.channel())
"""Granularities that kernels have configurations for; groups of 16 for some formats only
(:attr:`WeightFormat.smallest_group`)."""
GROUP_SIZES = tuple(each.group_size for each in GRANULARITIES[1:])
"""Group sizes that every weight format has, as the operators' ``group_size`` and configs write them: -1 is
one group of all channels."""


@dataclass(frozen=True)
class Problem:
    """Shape and types of a product of M rows of activations with a K x N weight.

    Attributes:
        m: rows of activations.
        n: columns of the weight, a multiple of 64.
        k: channels, a multiple of 64.
        granularity: one of :data:`GRANULARITIES`.
        zeros: whether the weight stores zero points.
        bfloat16: whether activations and scales are bfloat16; float16 otherwise.
        format: format of the weight.
        activation: name of the function in ``activation(gate) * up``, which is then the result, [M, N / 2].
            The weight has 64 columns of gate, 64 of up, 64 of gate and so on. None: the result is the
            product.
    """

    m: int
    n: int
    k: int
    granularity: Granularity
    zeros: bool
    bfloat16: bool
    format: WeightFormat
    activation: str | None = None

    @cached_property
    def quant_group(self) -> int:
        """QUANT_GROUP of a kernel's configuration: channels of a group; 0 for one scale per channel."""
        return self.granularity.channels

    @property
    def parameters(self) -> Parameters:
        """Members that every kernel's configuration struct takes from the problem."""
        element = "Bfloat16" if self.bfloat16 else "Half"
        return (
            ("Codec", f"{self.format.codec}<{element}>"),
            ("QUANT_GROUP", self.quant_group),
            ("ZEROS", self.zeros),
        )

    @property
    def activation_parameter(self) -> tuple[str, str]:
        """Member ACTIVATION of a configuration struct, for kernels that can apply an activation."""
        return "PAIR_ACTIVATION", f"Activation::{(self.activation or 'none').upper()}"

    @cached_property
    def bytes_per_weight(self) -> float:
        """Bytes of words, scales and zero points, per weight."""
        return self.format.bytes_per_weight + self.scale_bytes_per_weight

    @cached_property
    def scale_bytes_per_weight(self) -> float:
        """Bytes of scales and zero points, per weight."""
        return (4 if self.zeros else 2) / (self.k if self.quant_group == 0 else self.quant_group)
