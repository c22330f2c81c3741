"""Change of a weight's scheme, exact where possible and otherwise rounded with a stated error.

Exact:

* MXFP4 as MXFP8: every E2M1 value is an E4M3 value, and the scales stay.
* MXFP4 as NVFP4: an E4M3 scale holds the powers of two from 2**-9 to 2**8, and the second-level scale holds
  their common factor.
* MXFP4 as block FP8: a block's scale is a power of two, and the E4M3 codes absorb the differences between the
  exponents of its groups.
* A second-level scale that multiplies as one that divides, where it is a power of two.

Every other change between float schemes dequantises the weight and rounds it to the nearest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from marlinq.core.dtypes import torch_dtype
from marlinq.core.float_elements import E2M1, E4M3
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.core.schemes import MX_GROUP, NamedScheme
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import Layout
from marlinq.methods.rtn import round_to_nearest

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_NV_EXPONENTS = (-9, 8)
"""Least and largest exponent of the powers of two that E4M3 holds."""
_OCTAVES = _NV_EXPONENTS[1] - _NV_EXPONENTS[0] + 1
_LEAST_POWER = -126
"""Least exponent of a second-level scale: that of normal float32 numbers, whose reciprocals are finite."""

_SHIFTS = range(-12, 7)
"""Exponents of a group over its block's that are told apart: below -11 E4M3 holds no E2M1 value but zero."""
_NAN = 0x7F
"""An E4M3 code that is no number."""

Change = Callable[[QuantizedWeight], "QuantizedWeight | None"]


@dataclass(frozen=True)
class Recast:
    """Change of a module's scheme.

    Attributes:
        target: scheme of the result.
        exact: function that returns the same weight in the target scheme, or None where that scheme can't
            hold its values.
        refusal: reason to report when ``exact`` returns None.
        lossy: function that returns the nearest weight in the target scheme; None where rounding is not
            possible either.
    """

    target: Scheme
    exact: Change
    refusal: str
    lossy: Change | None = None

    def apply(self, weight: QuantizedWeight, *, allow_loss: bool) -> QuantizedWeight | None:
        """``weight`` in the target scheme; None where it isn't exact and ``allow_loss`` is False."""
        changed = self.exact(weight)
        if changed is None and allow_loss and self.lossy is not None:
            changed = self.lossy(weight)
        return changed


def recast(source: Scheme, layout: Layout, named: NamedScheme | None) -> Recast | str | None:
    """Change from scheme ``source`` to the wanted scheme.

    Args:
        source: scheme of the weight.
        layout: layout that the result is stored in.
        named: wanted scheme; None keeps the scheme, except that second-level scales get the convention
            (multiply or divide) of ``layout``.

    Returns:
        The change; a sentence why there is none; or None where the scheme stays the same.
    """
    use = layout.as_stored(source).tensor_scale
    if named is None or _is(source, named):
        if "none" in (use, source.tensor_scale) or use == source.tensor_scale:
            return None
        return Recast(
            replace(source, tensor_scale=use),
            lambda weight: _reciprocal(weight) if _has_exact_reciprocals(weight) else None,
            "reciprocals of its second-level scales are rounded, by a part in 2**24",
            _reciprocal,
        )
    if source.element.table is None or named.element.table is None:
        return f"{source.element.name} weights as {named.name}: only floats are converted to other schemes"
    if named.activations is not None and not named.activations.dynamic:
        return f"{named.name} needs activation scales, which calibration text gives; use quantize"
    assert named.granularity is not None, "every float scheme fixes its granularity"
    target = Scheme(
        element=named.element,
        granularity=named.granularity,
        zero_point=named.element.zero_point,
        scale_dtype=named.scale_dtype or layout.scale_dtype or "float32",
        tensor_scale=layout.as_stored(replace(source, tensor_scale="multiplies")).tensor_scale
        if named.two_levels
        else "none",
        activations=named.activations,
    )
    if _is(replace(source, activations=named.activations), named):
        inputs = replace(source, activations=named.activations)
        return Recast(inputs, lambda weight: _with_inputs(weight, named), "")
    refusal, exact = f"{source.describe()}, would be rounded again to {target.describe()}", _never
    mxfp4 = source.element == E2M1 and source.scale_dtype == "float8_e8m0fnu"
    if mxfp4 and named.element == E4M3 and named.granularity == MX_GROUP:
        exact, refusal = partial(_as_mxfp8, target=target), ""
    elif mxfp4 and named.two_levels:
        exact = partial(_as_nvfp4, target=target)
        refusal = (
            f"the exponents of its scales span more than {_OCTAVES} octaves, or none of them is above "
            f"{_LEAST_POWER + _NV_EXPONENTS[1] - 1}"
        )
    elif mxfp4 and named.granularity.kind == "block":
        exact = partial(_as_blocks, target=target)
        refusal = "the exponents in a block span more octaves than E4M3 holds"
    return Recast(target, exact, refusal, lambda weight: round_to_nearest(weight.dequantize(), target))


def _is(scheme: Scheme, named: NamedScheme) -> bool:
    """Whether ``scheme`` agrees with every field that ``named`` fixes."""
    return (
        scheme.element == named.element
        and named.granularity in (None, scheme.granularity)
        and (scheme.tensor_scale != "none") == named.two_levels
        and named.scale_dtype in (None, scheme.scale_dtype)
        and scheme.activations == named.activations
    )


def _never(weight: QuantizedWeight) -> QuantizedWeight | None:
    return None


def _with_inputs(weight: QuantizedWeight, named: NamedScheme) -> QuantizedWeight:
    return replace(weight, activations=named.activations, input_scale=None)


def _has_exact_reciprocals(weight: QuantizedWeight) -> bool:
    """Whether second-level and activation scales are powers of two with a reciprocal in float32."""
    scales = [scale.float() for scale in (weight.tensor_scale, weight.input_scale) if scale is not None]
    return all(
        float(torch.frexp(scale).mantissa) == 0.5 and bool(torch.isfinite(scale.reciprocal()))
        for scale in scales
    )


def _reciprocal(weight: QuantizedWeight) -> QuantizedWeight:
    """``weight`` with reciprocal second-level and activation scales: dividing where they multiplied before,
    or the reverse."""
    assert weight.tensor_scale is not None, "recast asks only for schemes with a second-level scale"
    return replace(
        weight,
        tensor_scale=weight.tensor_scale.reciprocal(),
        tensor_scale_divides=not weight.tensor_scale_divides,
        input_scale=None if weight.input_scale is None else weight.input_scale.float().reciprocal(),
    )


def _as_mxfp8(weight: QuantizedWeight, target: Scheme) -> QuantizedWeight:
    codes = _looked_up(_e4m3_codes(range(1)), weight.codes.int())
    return QuantizedWeight.from_codes(target, codes, scales=weight.scales)


def _e4m3_codes(powers: range) -> Tensor:
    """E4M3 codes of all E2M1 values times 2**power, uint8 [powers * 16]; NaN's where E4M3 does not hold
    one."""
    values = torch.tensor(E2M1.table) * torch.exp2(torch.tensor(powers).float()).unsqueeze(1)
    codes = E4M3.nearest(values)
    codes[:, 8] = 0x80  # -0.0 keeps its sign
    return torch.where(E4M3.decode(codes) == values, codes, torch.full_like(codes, _NAN)).flatten()


def _looked_up(table: Tensor, index: Tensor) -> Tensor:
    return torch.index_select(table, 0, index.flatten()).reshape(index.shape)


def _exponents(weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Exponents of the E8M0 scales (int32 [G, N]), and whether a group has a code that isn't zero
    (bool [G, N])."""
    exponents = weight.scales.view(torch.uint8).to(torch.int32) - 127
    size = weight.channels_per_group
    used = (weight.codes & 7).reshape(-1, size, weight.out_features).amax(dim=1) > 0
    return exponents, used


def _as_nvfp4(weight: QuantizedWeight, target: Scheme) -> QuantizedWeight | None:
    exponents, used = _exponents(weight)
    low, high = _NV_EXPONENTS
    if bool(used.any()):
        span = exponents[used]
        top, bottom = int(span.max()), int(span.min())
        if top - bottom >= _OCTAVES:
            return None
    else:
        top = 0
    # A group of zeros is exact with any scale.
    shifted = torch.where(used, exponents - top + high, torch.full_like(exponents, low))
    scales = torch.exp2(shifted.float()).to(torch.float8_e4m3fn)
    groups = Granularity.group(weight.channels_per_group // 2)
    assert groups == target.granularity, "an MX group is two NVFP4 groups"
    power = top - high
    if power < _LEAST_POWER:
        return None
    second = torch.tensor(2.0 ** (-power if target.tensor_scale == "divides" else power))
    return QuantizedWeight.from_codes(
        target, weight.codes, scales=scales.repeat_interleave(2, dim=0), tensor_scale=second
    )


def _as_blocks(weight: QuantizedWeight, target: Scheme) -> QuantizedWeight | None:
    """``weight`` as E4M3 with one scale a block, or None where E4M3 can't hold a block exactly.

    A block's scale is 2**(t - 6), with t its largest group exponent: the largest E2M1 value, 6, then becomes
    6 * 2**6 = 384 (E4M3 ends at 448), and smaller exponents have the most room below.
    """
    k, n = weight.in_features, weight.out_features
    exponents, used = _exponents(weight)
    shape = target.granularity.scales_shape(k, n)
    rows = torch.arange(exponents.shape[0]) * weight.channels_per_group // target.channels_per_group(k)
    columns = torch.arange(n) // target.granularity.outputs_per_group(n)
    place = (rows.unsqueeze(1) * shape[1] + columns).flatten()
    lowest = torch.full((shape[0] * shape[1],), -(1 << 20), dtype=torch.int32)
    known = torch.where(used, exponents, torch.full_like(exponents, -(1 << 20))).flatten()
    tops = lowest.scatter_reduce(0, place, known, "amax").reshape(shape)
    powers = torch.where(tops > -(1 << 19), tops - 6, torch.zeros_like(tops))
    if int(powers.min()) < -126 or int(powers.max()) > 127:
        return None
    shifts = exponents - powers.flatten()[place].reshape(exponents.shape)
    rows_of_table = (shifts.clamp(_SHIFTS[0], _SHIFTS[-1]) - _SHIFTS[0]) * E2M1.codes
    index = rows_of_table.repeat_interleave(weight.channels_per_group, dim=0) + weight.codes
    codes = _looked_up(_e4m3_codes(_SHIFTS), index)
    if bool((codes == _NAN).any()):
        return None
    scales = torch.exp2(powers.float()).to(torch_dtype(target.scale_dtype))
    return QuantizedWeight.from_codes(target, codes, scales=scales)
