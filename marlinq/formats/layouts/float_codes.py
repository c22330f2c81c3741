"""Layouts of float codes: rows of E4M3 bytes or E2M1 nibbles beside their scales (docs/formats.md).

    codes         E4M3: [N, K]; E2M1: [N, K/2], the even channel in the low nibble
    scales        [] or [1] for one scale, [N, 1] per output channel, [N, ceil(K/g)] per group,
                  [ceil(N/r), ceil(K/c)] per r x c block
    second level  float32 [] or [1], second-level scale
    input scale   [] or [1], scale of static activations

Formats differ in the names, in the dtype of the scales and in whether a scale multiplies or divides. The name
does not tell: ``weight_scale_inv`` multiplies in Hugging Face's files and divides in GPTQModel's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from marlinq.core.granularity import Granularity, GranularityKind
from marlinq.core.scheme import Scheme, TensorScale
from marlinq.core.weight import Grid
from marlinq.formats.layouts.byte_codes import ByteLayout
from marlinq.formats.layouts.layout import UNQUANTIZED, ModuleSpec, TensorSpec, spec_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_EXPONENTS = "float8_e8m0fnu"


@dataclass(frozen=True, kw_only=True)
class FloatNames:
    """Suffixes and dtypes of a linear's tensors in one format.

    Attributes:
        codes: suffix of the codes.
        code_dtype: dtype of the codes' tensor.
        scales: suffix of the scales.
        scale_dtype: dtype that loaders expect of the scales; None for the model's.
        exponent_bytes: whether scales of dtype E8M0 are written as uint8.
        second: suffix of the second-level scale; None where there is none.
        second_use: use of the second-level scale: multiplies, divides or none.
        inputs: suffix of the activations' scale; None where none is stored.
        single: shape of a tensor with one scale.
        flat: whether scales of output channels are [N], not [N, 1].
        divides: whether weights are codes divided by stored scales. Scales are then read as reciprocals,
            which float32 rounds.
    """

    codes: str = UNQUANTIZED
    code_dtype: str = "float8_e4m3fn"
    scales: str
    scale_dtype: str | None = None
    exponent_bytes: bool = False
    second: str | None = None
    second_use: TensorScale = "none"
    inputs: str | None = None
    single: tuple[int, ...] = ()
    flat: bool = False
    divides: bool = False


class FloatCodes(ByteLayout):
    """A layout of codes of one float element.

    Args:
        name: name of the layout.
        element: name of the element.
        names: names and dtypes of its tensors.
        granularities: kinds of granularity that the format describes.
        groups: the only group size that it holds; None for any.
    """

    holds_activations = True

    def __init__(
        self,
        name: str,
        element: str,
        names: FloatNames,
        *,
        granularities: tuple[GranularityKind, ...],
        groups: int | None = None,
    ) -> None:
        self.name = self.family = name
        self.elements = (element,)
        self.key, self.code_dtype = names.codes, names.code_dtype
        self.scale_key, self.scale_dtype = names.scales, names.scale_dtype
        extra = [suffix for suffix in (names.second, names.inputs) if suffix is not None]
        self.suffixes = (names.codes, names.scales, *extra)
        self.granularities, self.tensor_scales = granularities, (names.second_use,)
        self.rounds = "its scales divide, and float32 rounds their reciprocals" if names.divides else None
        self.only_groups = groups
        self._names = names

    def as_stored(self, scheme: Scheme) -> Scheme:
        return replace(scheme, tensor_scale=self._names.second_use)

    def says_all(self, spec: ModuleSpec) -> bool:
        return True

    def read_scale_dtype(self, stored: str) -> str:
        return _EXPONENTS if stored == "uint8" else stored

    def scheme_refusal(self, scheme: Scheme) -> str | None:
        if scheme.element.name in self.elements and (scheme.stores_zeros or scheme.act_order):
            return f"{scheme.describe()}; {self.name} stores neither zero points nor an order"
        if scheme.granularity.kind == "channel" and scheme.scale_dtype == self.scale_dtype:
            # A weight of K = one group has one scale per channel; shape_refusal checks K.
            scheme = self._in_groups(scheme)
        if (reason := super().scheme_refusal(scheme)) is not None:
            return reason
        if self.only_groups is not None and scheme.granularity != Granularity.group(self.only_groups):
            return f"{scheme.granularity.describe()}; {self.name} holds groups of {self.only_groups} only"
        inputs = scheme.activations
        if inputs is not None and not inputs.dynamic and self._names.inputs is None:
            return f"{inputs.describe()}; {self.name} stores no scale for them"
        return None

    def shape_refusal(self, spec: ModuleSpec) -> str | None:
        size = self.only_groups
        if size is not None and spec.in_features % size:
            return f"K={spec.in_features} is not a multiple of {size}"
        if size == spec.in_features:
            spec = replace(spec, scheme=self._in_groups(spec.scheme))
        elif size is not None and spec.scheme.granularity.kind == "channel":
            return f"{spec.granularity.describe()}; {self.name} holds groups of {size} only"
        return super().shape_refusal(spec)

    def _in_groups(self, scheme: Scheme) -> Scheme:
        """``scheme`` in groups of :attr:`only_groups`."""
        if self.only_groups is None:
            return scheme
        return replace(scheme, granularity=Granularity.group(self.only_groups))

    def value_refusal(self, grid: Grid) -> str | None:
        if self._has_input_scale(grid.scheme) and grid.input_scale is None:
            return "the activations' scale is missing"
        if self._names.second is not None and grid.tensor_scale is None:
            return "the second-level scale is missing"
        if self._names.divides:
            wide = grid.scales.float()
            changed = int((wide.reciprocal().reciprocal() != wide).sum())
            if changed:
                return f"the reciprocals of {changed} of {wide.numel()} scales are not exact in float32"
        return None

    def expected(self, spec: ModuleSpec) -> dict[str, TensorSpec]:
        names, scheme = self._names, spec.scheme
        bytes_ = scheme.scale_dtype == _EXPONENTS and names.exponent_bytes
        tensors = {
            names.codes: self.codes_spec(spec),
            names.scales: TensorSpec("uint8" if bytes_ else scheme.scale_dtype, self._scales_shape(spec)),
        }
        if names.second is not None:
            tensors[names.second] = TensorSpec("float32", names.single)
        if self._has_input_scale(scheme) and names.inputs is not None:
            tensors[names.inputs] = TensorSpec(self._input_dtype(scheme), names.single)
        return tensors

    @staticmethod
    def _has_input_scale(scheme: Scheme) -> bool:
        return scheme.activations is not None and not scheme.activations.dynamic

    def _input_dtype(self, scheme: Scheme) -> str:
        """The dtype of the activations' scale: that of the weights' scales where both follow the model."""
        return "float32" if self.scale_dtype is not None else scheme.scale_dtype

    def _scales_shape(self, spec: ModuleSpec) -> tuple[int, ...]:
        if spec.granularity.kind == "tensor":
            return self._names.single
        if spec.granularity.kind == "channel" and self._names.flat:
            return (spec.out_features,)
        return spec.granularity.scales_shape(*spec.shape)[::-1]

    def _pack_grid(self, grid: Grid, scheme: Scheme) -> dict[str, Tensor]:
        names = self._names
        scales = grid.scales.t().reshape(self._scales_shape(spec_of(grid))).contiguous()
        if names.divides:
            scales = scales.reciprocal()
        if names.exponent_bytes and scales.dtype == torch.float8_e8m0fnu:
            scales = scales.view(torch.uint8)
        tensors = {names.scales: scales}
        if names.second is not None:
            assert grid.tensor_scale is not None, "value_refusal says so"
            tensors[names.second] = grid.tensor_scale.reshape(names.single)
        if self._has_input_scale(scheme) and names.inputs is not None:
            assert grid.input_scale is not None, "value_refusal says so"
            dtype = getattr(torch, self._input_dtype(scheme))
            tensors[names.inputs] = grid.input_scale.to(dtype).reshape(names.single)
        return tensors

    def _unpack_grid(self, tensors: Mapping[str, Tensor], spec: ModuleSpec) -> Grid:
        names = self._names
        stored = tensors[names.scales]
        if stored.dtype == torch.uint8:
            stored = stored.view(torch.float8_e8m0fnu)
        groups, columns = spec.granularity.scales_shape(*spec.shape)
        scales = stored.reshape(columns, groups).t().contiguous()
        second = None if names.second is None else tensors[names.second].reshape(())
        inputs = None if names.inputs is None else tensors.get(names.inputs)
        return Grid.of(
            spec.scheme,
            spec.shape,
            scales=scales.float().reciprocal() if names.divides else scales,
            tensor_scale=second,
            input_scale=None if inputs is None else inputs.reshape(()),
        )
