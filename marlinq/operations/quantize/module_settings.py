"""Scheme, layout and method settings of one module."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Activations, Element, Scheme
from marlinq.core.sparsity import Sparsity
from marlinq.formats import Format, Layout
from marlinq.methods import MethodOptions

AUTO_GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class ModuleSettings:
    """The settings of one module.

    Attributes:
        element: type of its codes.
        granularity: weights that share a scale; None for a group size that is still to be chosen for all
            modules together (``auto``).
        symmetric: whether zero points are fixed at the middle code.
        scale_dtype: name of the scales' dtype; None where layout or model decide.
        two_levels: whether scales are multiplied by one further scale per tensor.
        activations: quantisation of the inputs by servers; None for 16-bit activations.
        sparsity: pattern of pruned weights; None for dense weights.
        method: name of the method that quantises it.
        options: options of that method.
        reason: source of the settings, as text.
    """

    element: Element
    granularity: Granularity | None
    symmetric: bool
    scale_dtype: str | None
    two_levels: bool
    activations: Activations | None
    sparsity: Sparsity | None
    method: str
    options: MethodOptions
    reason: str

    def layout(self, form: Format) -> Layout:
        """The layout of ``form`` that holds a module with these settings.

        Raises:
            ConversionRefused: the format has none.
        """
        return form.layout_of(self.typical)

    @property
    def typical(self) -> Scheme:
        """The scheme for a K of several groups: formats and methods are asked about it before K is known."""
        granularity = self.granularity or Granularity.group(AUTO_GROUP_SIZES[0])
        return replace(self, granularity=granularity).scheme(2 * AUTO_GROUP_SIZES[0], "float16")

    def scheme(self, in_features: int, scale_dtype: str) -> Scheme:
        """The scheme of a module with K = ``in_features``.

        Args:
            in_features: K.
            scale_dtype: dtype of scales where the settings have none.

        Raises:
            ValueError: the group size is still ``auto``.
        """
        if self.granularity is None:
            raise ValueError("an automatic group size is decided for all modules together, then stored")
        return Scheme(
            element=self.element,
            granularity=self.granularity.for_channels(in_features),
            zero_point=self.element.zero_point if self.symmetric else "stored",
            scale_dtype=self.scale_dtype or scale_dtype,
            tensor_scale="multiplies" if self.two_levels else "none",
            activations=self.activations,
            sparsity=self.sparsity,
        )

    def group_refusal(self, in_features: int) -> str | None:
        """Why a module with K = ``in_features`` can't have these groups or this sparsity, or None."""
        fitting = common_group_size([in_features])
        if self.granularity is None:
            if fitting is None:
                sizes = ", ".join(map(str, AUTO_GROUP_SIZES))
                return f"none of the group sizes {sizes} divides in_features {in_features}"
        elif self.granularity.kind == "group" and in_features % self.granularity.channels:
            hint = f", but of {fitting}" if fitting else ""
            size = self.granularity.channels
            return f"in_features {in_features} is not a multiple of group size {size}{hint}"
        if self.sparsity is not None and in_features % self.sparsity.span:
            return (
                f"in_features {in_features} is not a multiple of {self.sparsity.span} ({self.sparsity.name})"
            )
        return None


def common_group_size(in_features: Iterable[int]) -> int | None:
    """The largest automatic group size that divides every K of ``in_features``; None if none does."""
    common = math.gcd(*in_features)
    return next((size for size in AUTO_GROUP_SIZES if common % size == 0), None)
