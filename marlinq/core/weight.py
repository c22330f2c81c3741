"""A quantised weight in neutral order: the form through which every conversion between layouts goes.

A linear layer computes ``y = x @ W.T + b`` with K = in_features, N = out_features and

    W[n, k] = (value(codes[k, n]) - zeros[g, p]) * scales[g, p]

where g = g_idx[k] and p = n // outputs per scale. The K input channels are split into G groups and the N
output channels into P (:mod:`marlinq.core.granularity`). Where there is a second-level scale t, the product
is multiplied by t or divided by it. Every layout encodes some of these weights without loss, and refuses the
others with a reason (``Layout.refusal``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from marlinq.core.dtypes import SCALES, dtype_name
from marlinq.core.errors import CheckpointError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Activations, Element, Scheme, TensorScale
from marlinq.core.sparsity import Sparsity

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_SLAB = 512


def trivial_g_idx(in_features: int, channels_per_group: int, device: torch.device | None = None) -> Tensor:
    """``g_idx[k] = k // channels_per_group`` as int32 [K]; all zeros where a group has K channels or more."""
    return torch.arange(in_features, dtype=torch.int32, device=device) // channels_per_group


class _Facts(NamedTuple):
    """Facts about the values of a grid: extremes of g_idx, whether it is trivial, whether every zero point is
    the midpoint."""

    lowest: int
    highest: int
    trivial: bool
    midpoint: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid:
    """A quantised weight without its codes; enough to tell whether a layout can hold it.

    :meth:`of` makes one from a scheme.

    Attributes:
        element: type of a code.
        granularity: granularity of the scales; a group of K or more becomes a channel.
        out_features: N.
        scales: [G, P], of a dtype in :data:`marlinq.core.dtypes.SCALES`; negative values are legal.
        zeros: uint8 [G, P], zero points in code units; the element's midpoint everywhere means symmetric.
        g_idx: int32 [K], the group of each input channel, in ``0 .. G - 1``.
        tensor_scale: float32 [], second-level scale; None where there is none.
        tensor_scale_divides: whether products are divided by ``tensor_scale`` instead of multiplied.
        activations: how inputs are quantised according to the checkpoint; None for 16-bit activations.
        input_scale: float [], stored scale of static activations; None where there is none.
        sparsity: sparsity rule of the codes according to the checkpoint; None for dense weights.

    Raises:
        CheckpointError: the parts don't fit together (shape, dtype or range).
    """

    element: Element
    granularity: Granularity
    out_features: int
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor
    tensor_scale: Tensor | None = None
    tensor_scale_divides: bool = False
    activations: Activations | None = None
    input_scale: Tensor | None = None
    sparsity: Sparsity | None = None

    @classmethod
    def of(
        cls,
        scheme: Scheme,
        shape: tuple[int, int],
        *,
        scales: Tensor,
        zeros: Tensor | None = None,
        g_idx: Tensor | None = None,
        tensor_scale: Tensor | None = None,
        input_scale: Tensor | None = None,
    ) -> Grid:
        """The grid of a weight of ``scheme`` from its stored tensors.

        Args:
            scheme: scheme of the weight.
            shape: (K, N).
            scales, tensor_scale, input_scale: as the attributes.
            zeros: zero points; the element's midpoint where None.
            g_idx: group of each channel; None for ``k // group size``.
        """
        return Grid(**_parts(scheme, shape, scales, zeros, g_idx, tensor_scale, input_scale))

    def __post_init__(self) -> None:
        if self.g_idx.dtype != torch.int32 or self.g_idx.dim() != 1:
            raise CheckpointError(
                f"g_idx: expected int32 [K], found {self.g_idx.dtype} {list(self.g_idx.shape)}"
            )
        k = self.in_features
        object.__setattr__(self, "granularity", self.granularity.for_channels(k))
        if self.scales.dim() != 2 or dtype_name(self.scales.dtype) not in SCALES:
            raise CheckpointError(
                f"scales: expected float [G, P], found {self.scales.dtype} {list(self.scales.shape)}"
            )
        shape = self.granularity.scales_shape(k, self.out_features)
        if tuple(self.scales.shape) != shape:
            raise CheckpointError(f"scales: expected {list(shape)}, found {list(self.scales.shape)}")
        if tuple(self.zeros.shape) != shape or self.zeros.dtype != torch.uint8:
            raise CheckpointError(
                f"zeros: expected uint8 {list(shape)}, found {self.zeros.dtype} {list(self.zeros.shape)}"
            )
        second = self.tensor_scale
        if second is not None and (second.dtype != torch.float32 or second.dim() != 0):
            raise CheckpointError(
                f"tensor_scale: expected float32 [], found {second.dtype} {list(second.shape)}"
            )
        if second is None and self.tensor_scale_divides:
            raise CheckpointError("tensor_scale: expected a scale to divide by, found none")
        facts = self._facts
        if facts.lowest < 0 or facts.highest >= shape[0]:
            found = f"{facts.lowest}..{facts.highest}"
            raise CheckpointError(f"g_idx: expected values in 0..{shape[0] - 1}, found {found}")

    @cached_property
    def _facts(self) -> _Facts:
        """Computed together, so that the host waits for a GPU only once."""
        lowest, highest = self.g_idx.aminmax()
        regular = trivial_g_idx(self.in_features, self.channels_per_group, self.g_idx.device)
        trivial = (self.g_idx == regular).all()
        midpoint = (self.zeros == self.element.midpoint).all()
        numbers = torch.stack((lowest, highest, trivial.to(torch.int32), midpoint.to(torch.int32))).tolist()
        return _Facts(numbers[0], numbers[1], bool(numbers[2]), bool(numbers[3]))

    @property
    def in_features(self) -> int:
        """K."""
        return self.g_idx.shape[0]

    @property
    def groups(self) -> int:
        """G, the number of groups along K."""
        return self.scales.shape[0]

    @property
    def channels_per_group(self) -> int:
        """Input channels that share a scale, 1..K."""
        return self.granularity.channels_per_group(self.in_features)

    @cached_property
    def scheme(self) -> Scheme:
        """The scheme that the values have, whatever a config says.

        It is symmetric exactly when every zero point is the element's midpoint. It is in activation order
        exactly when some channel k is not in group ``k // channels_per_group``.
        """
        use: TensorScale = "divides" if self.tensor_scale_divides else "multiplies"
        return Scheme(
            element=self.element,
            granularity=self.granularity,
            zero_point=self.element.zero_point if self._facts.midpoint else "stored",
            scale_dtype=dtype_name(self.scales.dtype),
            tensor_scale="none" if self.tensor_scale is None else use,
            act_order=not self.has_trivial_g_idx,
            activations=self.activations,
            sparsity=self.sparsity,
        )

    @property
    def has_trivial_g_idx(self) -> bool:
        """True when channel k belongs to group ``k // channels_per_group``: no activation order is stored."""
        return self._facts.trivial

    def to(self, device: torch.device) -> Self:
        """A copy with all tensors on ``device``."""
        own: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        tensors = {name: value for name, value in own.items() if isinstance(value, torch.Tensor)}
        if all(tensor.device == device for tensor in tensors.values()):
            return self
        return type(self)(**own | {name: tensor.to(device) for name, tensor in tensors.items()})

    def with_codes(self, codes: Tensor) -> QuantizedWeight:
        """The weight whose codes are ``codes``, uint8 [K, N]."""
        return QuantizedWeight(**{each.name: getattr(self, each.name) for each in fields(Grid)}, codes=codes)

    def per_output(self, values: Tensor) -> Tensor:
        """``values`` [G, P], scales or zero points, repeated for every output channel: [G, N]."""
        if values.shape[1] == self.out_features:
            return values
        repeated = values.repeat_interleave(self.granularity.outputs_per_group(self.out_features), dim=1)
        return repeated[:, : self.out_features]


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedWeight(Grid):
    """The quantised weight of one linear layer, independent of any file layout.

    Attributes:
        codes: uint8 [K, N], each in ``0 .. 2**element.bits - 1``.

    Raises:
        CheckpointError: the parts don't fit together (shape, dtype or range).
    """

    codes: Tensor

    @classmethod
    def from_codes(
        cls,
        scheme: Scheme,
        codes: Tensor,
        *,
        scales: Tensor,
        zeros: Tensor | None = None,
        g_idx: Tensor | None = None,
        tensor_scale: Tensor | None = None,
        input_scale: Tensor | None = None,
    ) -> QuantizedWeight:
        """The weight of ``scheme`` with ``codes``, uint8 [K, N]; other arguments as in :meth:`Grid.of`."""
        shape = (codes.shape[0], codes.shape[1])
        parts = _parts(scheme, shape, scales, zeros, g_idx, tensor_scale, input_scale)
        return cls(**parts, codes=codes)

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = [self.in_features, self.out_features]
        if self.codes.dtype != torch.uint8 or list(self.codes.shape) != shape:
            raise CheckpointError(
                f"codes: expected uint8 {shape}, found {self.codes.dtype} {list(self.codes.shape)}"
            )

    def used(self) -> Tensor:
        """bool [K, N], whether the value of a code is not zero."""
        if self.element.table is not None:
            return self.element.decode(self.codes) != 0
        if self.has_trivial_g_idx and self.scheme.zero_point == "midpoint":
            return self.codes != self.element.midpoint
        return self.codes != self.per_output(self.zeros)[self.g_idx.long()]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The dense weight W, [N, K], computed in float32 and cast to ``dtype`` (default float32)."""
        zeros = self.per_output(self.zeros.to(torch.float32))
        scales = self.per_output(self.scales.to(torch.float32))
        weight = torch.empty(
            self.out_features, self.in_features, dtype=dtype or torch.float32, device=self.codes.device
        )
        # In slabs of rows: the float32 intermediates are several times the size of the codes.
        g = self.channels_per_group
        if self.has_trivial_g_idx and self.in_features == g * len(scales):
            whole = max(_SLAB // g, 1)
            for first in range(0, len(scales), whole):
                part, slab = slice(first, first + whole), slice(first * g, (first + whole) * g)
                values = self.element.decode(self.codes[slab]).view(-1, g, self.out_features)
                values = (values - zeros[part].unsqueeze(1)).mul_(scales[part].unsqueeze(1))
                weight[:, slab] = self._second_level(values.view(-1, self.out_features)).t()
            return weight
        groups = self.g_idx.long()
        for start in range(0, self.in_features, _SLAB):
            slab = slice(start, start + _SLAB)
            centred = self.element.decode(self.codes[slab]) - zeros[groups[slab]]
            weight[:, slab] = self._second_level(centred * scales[groups[slab]]).t()
        return weight

    def _second_level(self, values: Tensor) -> Tensor:
        if self.tensor_scale is None:
            return values
        return values / self.tensor_scale if self.tensor_scale_divides else values * self.tensor_scale

    def difference(self, other: QuantizedWeight) -> str | None:
        """Where ``other`` first differs, in words, or None when both hold the same values.

        Scales are compared bit for bit after an exact widening to float32, so float16 and bfloat16
        scales of equal value agree while -0.0 and 0.0 do not.
        """
        mine, theirs = (
            (each.element, each.granularity, each.scheme.tensor_scale, each.activations)
            for each in (self, other)
        )
        if mine != theirs:
            return f"{self.scheme.describe()} against {other.scheme.describe()}"
        for name in ("codes", "scales", "zeros", "g_idx", "tensor_scale", "input_scale"):
            difference = _difference(getattr(self, name), getattr(other, name))
            if difference is not None:
                return f"{name}: {difference}"
        return None


def _difference(mine: Tensor | None, theirs: Tensor | None) -> str | None:
    if mine is None or theirs is None:
        return None if mine is theirs else "in one of the two only"
    if mine.shape != theirs.shape:
        return f"shape {list(mine.shape)} against {list(theirs.shape)}"
    if mine.is_floating_point():
        mine, theirs = (tensor.to(torch.float32).view(torch.int32) for tensor in (mine, theirs))
    unequal = mine != theirs
    if not bool(unequal.any()):
        return None
    first = unequal.nonzero()[0].tolist()
    return f"{int(unequal.sum())} of {unequal.numel()} values differ, first at {first}"


def _parts(
    scheme: Scheme,
    shape: tuple[int, int],
    scales: Tensor,
    zeros: Tensor | None,
    g_idx: Tensor | None,
    tensor_scale: Tensor | None,
    input_scale: Tensor | None,
) -> dict[str, Any]:
    """The fields of a :class:`Grid` of K, N = ``shape``."""
    k, n = shape
    device = scales.device
    if zeros is None:
        middle, of_zeros = scheme.element.midpoint, scheme.granularity.scales_shape(k, n)
        zeros = torch.full(of_zeros, middle, dtype=torch.uint8, device=device)
    return {
        "element": scheme.element,
        "granularity": scheme.granularity,
        "out_features": n,
        "scales": scales,
        "zeros": zeros,
        "g_idx": trivial_g_idx(k, scheme.channels_per_group(k), device) if g_idx is None else g_idx,
        "tensor_scale": tensor_scale,
        "tensor_scale_divides": scheme.tensor_scale == "divides",
        "activations": scheme.activations,
        "input_scale": input_scale,
        "sparsity": scheme.sparsity,
    }
