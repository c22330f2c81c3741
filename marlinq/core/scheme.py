"""How a weight is quantised: the element type, what shares a scale, the zero point.

A quantised weight with K input and N output channels stands for

    W[n, k] = (value(codes[k, n]) - zeros[g_idx[k], n]) * scales[g_idx[k], n]

where ``value`` is the element's: an integer element's code is its own value, any other element has a table.
Everything that depends on bits, groups or symmetry asks the scheme. A new element type is one
:class:`Element` and a call of :func:`register_element`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from marlinq.core.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

ZeroPoint = Literal["none", "midpoint", "stored"]
"""``none``: codes are signed values already; ``midpoint``: always 2**(bits-1); ``stored``: one per group."""

CHANNEL = -1
"""The group size of a scheme with one scale per output channel, as configs write it."""


@dataclass(frozen=True)
class Element:
    """The type of one code.

    Attributes:
        name: ``int4``, ``int8``; what reports and refusals call it.
        bits: of a code; 4 or 8 today, which is what words are packed of.
        table: the value of each code from 0 to 2**bits - 1, ascending or not; None for integers, whose codes
            are their values.
    """

    name: str
    bits: int
    table: tuple[float, ...] | None = None

    @property
    def codes(self) -> int:
        """How many codes there are."""
        return 1 << self.bits

    @property
    def midpoint(self) -> int:
        """The zero point of a symmetric weight in code units: 8 for int4; 0 for a table, whose values have
        signs."""
        return 0 if self.table is not None else 1 << (self.bits - 1)

    @property
    def zero_point(self) -> ZeroPoint:
        """What a weight has whose zero points are all :attr:`midpoint`."""
        return "none" if self.table is not None else "midpoint"

    def decode(self, codes: Tensor) -> Tensor:
        """The values of ``codes`` (uint8, any shape), float32."""
        if self.table is None:
            return codes.to(torch.float32)
        return torch.tensor(self.table, dtype=torch.float32, device=codes.device)[codes.long()]

    def nearest(self, values: Tensor) -> Tensor:
        """The codes, uint8, whose values are nearest to ``values`` (float32, any shape)."""
        if self.table is None:
            return torch.round(values).clamp_(0, self.codes - 1).to(torch.uint8)
        table = torch.tensor(self.table, dtype=torch.float32, device=values.device)
        ordered, codes = table.sort()
        places = torch.bucketize(values.contiguous(), (ordered[1:] + ordered[:-1]) / 2)
        return codes[places].to(torch.uint8)


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
        UnsupportedError: there is none; the message lists the widths that there are.
    """
    found = ELEMENTS.get(f"int{bits}")
    if found is None:
        widths = sorted(element.bits for element in ELEMENTS.values() if element.table is None)
        raise UnsupportedError(
            f"{bits} bits are not supported; marlinq handles {' and '.join(map(str, widths))}"
        )
    return found


@dataclass(frozen=True)
class Scheme:
    """How one weight is quantised.

    Attributes:
        element: the type of a code.
        group_size: input channels that share a scale; :data:`CHANNEL` (-1) for one scale per output channel.
        zero_point: see :data:`ZeroPoint`.
        scale_dtype: name of the scales' dtype.
        act_order: a stored ``g_idx`` says which group a channel belongs to, instead of ``k // group_size``.
        sparsity: ``dense``; the only kind today.
        activations: ``16-bit``: weights alone are quantised; the only kind today.
    """

    element: Element = INT4
    group_size: int = 128
    zero_point: ZeroPoint = "midpoint"
    scale_dtype: str = "float16"
    act_order: bool = False
    sparsity: Literal["dense"] = "dense"
    activations: Literal["16-bit"] = "16-bit"

    @property
    def stores_zeros(self) -> bool:
        """Whether groups have zero points of their own."""
        return self.zero_point == "stored"

    def channels_per_group(self, in_features: int) -> int:
        """Input channels that share a scale in a weight of K = ``in_features``, at most K."""
        return in_features if self.group_size == CHANNEL else min(self.group_size, in_features)

    def groups(self, in_features: int) -> int:
        """G: rows of scales in a weight of K = ``in_features``; the last group may be short."""
        return group_count(in_features, self.group_size)

    def for_channels(self, in_features: int) -> Scheme:
        """The same scheme for a weight of K = ``in_features``: a group of K or more is one per channel."""
        return self.with_group_size(CHANNEL) if self.group_size >= in_features else self

    def with_group_size(self, group_size: int) -> Scheme:
        """The same scheme with another group size."""
        return replace(self, group_size=group_size)

    def describe(self) -> str:
        """For people: ``int4, groups of 128, asymmetric``."""
        granularity = (
            "one scale per channel" if self.group_size == CHANNEL else f"groups of {self.group_size}"
        )
        kind = {"none": "signed", "midpoint": "symmetric", "stored": "asymmetric"}[self.zero_point]
        return f"{self.element.name}, {granularity}, {kind}" + (", act-order" if self.act_order else "")


def group_count(in_features: int, group_size: int) -> int:
    """Groups along K; ``group_size`` -1 means one group (channelwise). A last group may be short."""
    return 1 if group_size == CHANNEL else -(-in_features // group_size)
