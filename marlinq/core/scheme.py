"""How a weight is quantised: element type, granularity of the scales, zero point, activations.

A quantised weight with K input and N output channels stands for

    W[n, k] = (value(codes[k, n]) - zeros[g, p]) * scales[g, p]

where g = g_idx[k] and p = n // outputs per scale. ``value`` maps a code to its value: the code itself for
integers, an entry of a table for other elements. With a second-level scale t, one per tensor, the product is
multiplied or divided by t (:data:`TensorScale`).

A new element type is one :class:`Element` and a call of :func:`register_element`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.sparsity import Sparsity

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

ZeroPoint = Literal["none", "midpoint", "stored"]
"""``none``: codes are signed values already; ``midpoint``: always 2**(bits-1); ``stored``: one per group."""

TensorScale = Literal["none", "multiplies", "divides"]
"""Whether products of values and scales are multiplied or divided by a second-level scale. It is stored apart
from the scales, since neither their product nor its reciprocal is exact in float32."""


@dataclass(frozen=True)
class Element:
    """The type of one code.

    Attributes:
        name: name in reports and messages, such as ``int4``; elements with equal names are equal.
        bits: bits of a code, 4 or 8.
        table: value of each code from 0 to 2**bits - 1 in any order, NaN for codes without a value; None for
            integers, whose codes are their values.
    """

    name: str
    bits: int
    table: tuple[float, ...] | None = field(default=None, compare=False)

    @property
    def codes(self) -> int:
        """Number of codes, 2**bits."""
        return 1 << self.bits

    @property
    def ends(self) -> tuple[float, float]:
        """The least and the largest value."""
        values = range(self.codes) if self.table is None else [v for v in self.table if not math.isnan(v)]
        return min(values), max(values)

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric weight in code units: 8 for int4; 0 for a table, whose values have
        signs."""
        return 0 if self.table is not None else 1 << (self.bits - 1)

    @property
    def zero_point(self) -> ZeroPoint:
        """Kind of zero point of a weight whose zero points are all :attr:`midpoint`."""
        return "none" if self.table is not None else "midpoint"

    def decode(self, codes: Tensor) -> Tensor:
        """The values of ``codes`` (uint8, any shape), float32."""
        if self.table is None:
            return codes.to(torch.float32)
        return torch.tensor(self.table, dtype=torch.float32, device=codes.device)[codes.long()]

    def nearest(self, values: Tensor) -> Tensor:
        """The codes, uint8, whose values are nearest to ``values`` (float32, any shape).

        Halfway between two values the even code is taken, as IEEE 754 rounds; integers round to even values.
        """
        if self.table is None:
            return torch.round(values).clamp_(0, self.codes - 1).to(torch.uint8)
        codes, bounds, _ = _nearest_code(self.table, values.device)
        return codes[torch.bucketize(values.contiguous(), bounds)]

    def rounded(self, values: Tensor) -> Tensor:
        """The values of :meth:`nearest`, float32."""
        if self.table is None:
            return torch.round(values).clamp_(0, self.codes - 1)
        _, bounds, different = _nearest_code(self.table, values.device)
        return different[torch.bucketize(values.contiguous(), bounds)]


@lru_cache(maxsize=16)
def _nearest_code(table: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of distinct values, uint8 in ascending order of value; the largest float32 value that is
    nearest to each but the last; and the values, float32."""
    lowest: dict[float, int] = {}
    for code, value in enumerate(table):
        if not math.isnan(value):
            lowest.setdefault(value, code)
    values = sorted(lowest)
    codes = torch.tensor([lowest[value] for value in values], dtype=torch.uint8)
    wide = torch.tensor(values, dtype=torch.float64)
    bounds = ((wide[1:] + wide[:-1]) / 2).to(torch.float32)
    # A value equal to a bound goes to the lower code, so the bound is lowered where the upper code is even.
    below = torch.nextafter(bounds, torch.full_like(bounds, -torch.inf))
    bounds = torch.where(codes[:-1] % 2 == 0, bounds, below)
    return codes.to(device), bounds.to(device), wide.to(device, torch.float32)


ELEMENTS: dict[str, Element] = {}
"""Every element type by name."""


def register_element(element: Element) -> Element:
    """Make ``element`` known to recipes, configs and layouts by its name; returns it."""
    ELEMENTS[element.name] = element
    return element


INT4 = register_element(Element("int4", 4))
INT8 = register_element(Element("int8", 8))


def integer_element(bits: int) -> Element:
    """The integer element of ``bits`` bits.

    Raises:
        UnsupportedError: there is none; the message lists the widths that exist.
    """
    known = ELEMENTS.get(f"int{bits}")
    if known is None:
        widths = sorted(element.bits for element in ELEMENTS.values() if element.table is None)
        raise UnsupportedError(
            f"{bits} bits are not supported; marlinq handles {' and '.join(map(str, widths))}"
        )
    return known


@dataclass(frozen=True)
class Activations:
    """How the inputs of a linear layer are quantised, according to the checkpoint.

    Attributes:
        element: type of a quantised input.
        granularity: granularity of the scales of a matrix [tokens, K]: tensor, channel (one scale per token),
            or group (one per token and group of K).
        dynamic: scales are computed at run time; otherwise the checkpoint stores them.
    """

    element: Element
    granularity: Granularity
    dynamic: bool

    def describe(self) -> str:
        """Text for messages: ``dynamic fp8_e4m3 activations, one scale per token``."""
        shared = {"tensor": "one scale per tensor", "channel": "one scale per token"}
        granularity = shared.get(self.granularity.kind, f"{self.granularity.describe()} per token")
        return f"{'dynamic' if self.dynamic else 'static'} {self.element.name} activations, {granularity}"


@dataclass(frozen=True)
class Scheme:
    """How one weight is quantised.

    Attributes:
        element: type of a code.
        granularity: granularity of the scales.
        zero_point: kind of zero points (:data:`ZeroPoint`).
        scale_dtype: name of the scales' dtype; float16 where it is not known yet, as from a config.
        tensor_scale: use of a second-level scale (:data:`TensorScale`).
        act_order: whether a stored ``g_idx`` gives the group of each channel, instead of ``k // group size``.
        activations: how the inputs are quantised; None for 16-bit activations.
        sparsity: rule by which weights are zero; None for dense weights, and for sparse ones in a layout that
            stores zeros as codes and does not mark them.
    """

    element: Element
    granularity: Granularity
    zero_point: ZeroPoint
    scale_dtype: str = "float16"
    tensor_scale: TensorScale = "none"
    act_order: bool = False
    activations: Activations | None = None
    sparsity: Sparsity | None = None

    @property
    def stores_zeros(self) -> bool:
        """Whether groups have zero points of their own."""
        return self.zero_point == "stored"

    @property
    def per_output(self) -> bool:
        """Whether output channels share no scale, so that each can be quantised by itself."""
        return self.granularity.outputs == 1 and self.tensor_scale == "none"

    def channels_per_group(self, in_features: int) -> int:
        """Input channels that share a scale in a weight of K = ``in_features``, at most K."""
        return self.granularity.channels_per_group(in_features)

    def groups(self, in_features: int) -> int:
        """G: rows of scales in a weight of K = ``in_features``; the last group may be short."""
        return self.granularity.groups(in_features)

    def for_channels(self, in_features: int) -> Scheme:
        """The same scheme for a weight of K = ``in_features``: a group of K or more is one per channel."""
        return replace(self, granularity=self.granularity.for_channels(in_features))

    def describe(self) -> str:
        """Text for messages: ``int4, groups of 128, asymmetric``."""
        kind = {"none": "signed", "midpoint": "symmetric", "stored": "asymmetric"}[self.zero_point]
        parts = [self.element.name, self.granularity.describe(), kind]
        if self.tensor_scale != "none":
            parts.append(f"scales in {self.scale_dtype} and one per tensor")
        if self.act_order:
            parts.append("act-order")
        if self.activations is not None:
            parts.append(self.activations.describe())
        if self.sparsity is not None:
            parts.append(self.sparsity.describe())
        return ", ".join(parts)
