"""A quantised weight between every pair of tensor layouts: codes, scales, zero points, groups.

A linear layer computes ``y = x @ W.T + b`` with K = in_features, N = out_features and

    W[n, k] = (value(codes[k, n]) - zeros[g_idx[k], n]) * scales[g_idx[k], n]

where the K input channels are split into G groups (:mod:`marlinq.core.scheme`). Every layout is a lossless
encoding of a subset of these values; what a layout can't hold it refuses by name (``Layout.refusal``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from marlinq.core.dtypes import FLOATS, dtype_name
from marlinq.core.errors import CheckpointError
from marlinq.core.scheme import CHANNEL, INT4, Element, Scheme, group_count

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_SLAB = 512


def trivial_g_idx(in_features: int, group_size: int, device: torch.device | None = None) -> Tensor:
    """``g_idx[k] = k // group_size`` as int32 [K]; all zeros when ``group_size`` is -1."""
    if group_size == CHANNEL:
        return torch.zeros(in_features, dtype=torch.int32, device=device)
    return torch.arange(in_features, dtype=torch.int32, device=device) // group_size


class _Facts(NamedTuple):
    """What is asked of a grid's values: extremes of g_idx, whether it is trivial, whether every zero point
    is the midpoint."""

    lowest: int
    highest: int
    trivial: bool
    midpoint: bool


@dataclass(frozen=True, eq=False)
class Grid:
    """Everything of a quantised weight but its codes: what decides whether a layout can hold it.

    Attributes:
        scales: float16, bfloat16 or float32 [G, N]; negative values are legal.
        zeros: uint8 [G, N], zero points in code units; the element's midpoint everywhere means symmetric.
        g_idx: int32 [K], the group of each input channel, in ``0 .. G - 1``.
        group_size: channels per group, 1..K; a channelwise weight (one group) has ``group_size == K``.
        element: the type of a code.

    Raises:
        CheckpointError: the parts don't fit together (shape, dtype or range).
    """

    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    group_size: int
    element: Element = INT4

    def __post_init__(self) -> None:
        if self.g_idx.dtype != torch.int32 or self.g_idx.dim() != 1:
            raise CheckpointError(
                f"g_idx: expected int32 [K], found {self.g_idx.dtype} {list(self.g_idx.shape)}"
            )
        k = self.in_features
        if not 1 <= self.group_size <= k:
            raise CheckpointError(f"group_size: expected 1..{k} (K), found {self.group_size}")
        if self.scales.dim() != 2 or dtype_name(self.scales.dtype) not in FLOATS:
            raise CheckpointError(
                f"scales: expected float [G, N], found {self.scales.dtype} {list(self.scales.shape)}"
            )
        shape = (group_count(k, self.group_size), self.out_features)
        if tuple(self.scales.shape) != shape:
            raise CheckpointError(f"scales: expected {list(shape)}, found {list(self.scales.shape)}")
        if tuple(self.zeros.shape) != shape or self.zeros.dtype != torch.uint8:
            raise CheckpointError(
                f"zeros: expected uint8 {list(shape)}, found {self.zeros.dtype} {list(self.zeros.shape)}"
            )
        facts = self._facts
        if facts.lowest < 0 or facts.highest >= shape[0]:
            found = f"{facts.lowest}..{facts.highest}"
            raise CheckpointError(f"g_idx: expected values in 0..{shape[0] - 1}, found {found}")

    @cached_property
    def _facts(self) -> _Facts:
        """All at once: a GPU is waited for a single time."""
        lowest, highest = self.g_idx.aminmax()
        regular = trivial_g_idx(self.in_features, self.group_size, self.g_idx.device)
        trivial = (self.g_idx == regular).all()
        midpoint = (self.zeros == self.element.midpoint).all()
        found = torch.stack((lowest, highest, trivial.to(torch.int32), midpoint.to(torch.int32))).tolist()
        return _Facts(found[0], found[1], bool(found[2]), bool(found[3]))

    @property
    def in_features(self) -> int:
        """K."""
        return self.g_idx.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return self.scales.shape[1]

    @property
    def groups(self) -> int:
        """G, the number of groups along K."""
        return self.scales.shape[0]

    @cached_property
    def scheme(self) -> Scheme:
        """What the values are, whatever a config says of them: symmetric exactly when every zero point is the
        element's midpoint, in activation order exactly when some channel k is not in group
        ``k // group_size``."""
        return Scheme(
            element=self.element,
            group_size=CHANNEL if self.groups == 1 else self.group_size,
            zero_point=self.element.zero_point if self._facts.midpoint else "stored",
            scale_dtype=dtype_name(self.scales.dtype),
            act_order=not self.has_trivial_g_idx,
        )

    @cached_property
    def has_trivial_g_idx(self) -> bool:
        """True when channel k belongs to group ``k // group_size``: no activation order is stored."""
        return self._facts.trivial

    def to(self, device: torch.device) -> Grid:
        """The same grid with all its tensors on ``device``."""
        if all(tensor.device == device for tensor in (self.scales, self.zeros, self.g_idx)):
            return self
        return replace(
            self,
            scales=self.scales.to(device),
            zeros=self.zeros.to(device),
            g_idx=self.g_idx.to(device),
        )


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """The quantised weight of one linear layer, independent of any file layout.

    Attributes:
        codes: uint8 [K, N], each in ``0 .. 2**element.bits - 1``.
        scales, zeros, g_idx, group_size, element: as in :class:`Grid`.

    Raises:
        CheckpointError: the parts don't fit together (shape, dtype or range).
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    group_size: int
    element: Element = INT4

    def __post_init__(self) -> None:
        shape = [self.grid.in_features, self.grid.out_features]
        if self.codes.dtype != torch.uint8 or list(self.codes.shape) != shape:
            raise CheckpointError(
                f"codes: expected uint8 {shape}, found {self.codes.dtype} {list(self.codes.shape)}"
            )

    @cached_property
    def grid(self) -> Grid:
        """Everything but the codes."""
        return Grid(self.scales, self.zeros, self.g_idx, self.group_size, self.element)

    @property
    def in_features(self) -> int:
        """K."""
        return self.codes.shape[0]

    @property
    def out_features(self) -> int:
        """N."""
        return self.codes.shape[1]

    @property
    def groups(self) -> int:
        """G, the number of groups along K."""
        return self.scales.shape[0]

    @property
    def scheme(self) -> Scheme:
        """What the values are (:attr:`Grid.scheme`)."""
        return self.grid.scheme

    @property
    def has_trivial_g_idx(self) -> bool:
        """True when channel k belongs to group ``k // group_size``: no activation order is stored."""
        return self.grid.has_trivial_g_idx

    def to(self, device: torch.device) -> QuantizedWeight:
        """The same weight with all its tensors on ``device``."""
        if self.codes.device == device:
            return self
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            zeros=self.zeros.to(device),
            g_idx=self.g_idx.to(device),
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight W, [N, K], computed in float32 and cast to ``dtype`` (default float32)."""
        zeros = self.zeros.to(torch.float32)
        scales = self.scales.to(torch.float32)
        weight = torch.empty(
            self.out_features, self.in_features, dtype=dtype or torch.float32, device=self.codes.device
        )
        # A slab at a time: the float32 intermediates are several times the size of the codes.
        g = self.group_size
        if self.has_trivial_g_idx and self.in_features == g * len(scales):
            whole = max(_SLAB // g, 1)
            for first in range(0, len(scales), whole):
                part, slab = slice(first, first + whole), slice(first * g, (first + whole) * g)
                values = self.element.decode(self.codes[slab]).view(-1, g, self.out_features)
                values = (values - zeros[part].unsqueeze(1)).mul_(scales[part].unsqueeze(1))
                weight[:, slab] = values.view(-1, self.out_features).t()
            return weight
        groups = self.g_idx.long()
        for start in range(0, self.in_features, _SLAB):
            slab = slice(start, start + _SLAB)
            centred = self.element.decode(self.codes[slab]) - zeros[groups[slab]]
            weight[:, slab] = (centred * scales[groups[slab]]).t()
        return weight

    def difference(self, other: QuantizedWeight) -> str | None:
        """Where ``other`` first differs, in words, or None when both hold the same values.

        Scales are compared bit for bit after an exact widening to float32, so float16 and bfloat16
        scales of equal value agree while -0.0 and 0.0 do not.
        """
        if (self.element, self.group_size) != (other.element, other.group_size):
            return (
                f"{self.element.name}, group size {self.group_size} against "
                f"{other.element.name}, group size {other.group_size}"
            )
        pairs = (
            ("codes", self.codes, other.codes),
            (
                "scales",
                self.scales.to(torch.float32).view(torch.int32),
                other.scales.to(torch.float32).view(torch.int32),
            ),
            ("zeros", self.zeros, other.zeros),
            ("g_idx", self.g_idx, other.g_idx),
        )
        for name, mine, theirs in pairs:
            if mine.shape != theirs.shape:
                return f"{name}: shape {list(mine.shape)} against {list(theirs.shape)}"
            unequal = mine != theirs
            if bool(unequal.any()):
                first = unequal.nonzero()[0].tolist()
                return f"{name}: {int(unequal.sum())} of {unequal.numel()} values differ, first at {first}"
        return None
