"""Make the kernels' operand from a stored weight of any shape and layout.

Kernels take K and N that are multiples of 64, groups of 32, 64, 128 or one scale per channel, and no g_idx.
4-bit integers of such a shape keep their words: as stored if they are in the kernels' layout, else transcoded
on the device without unpacking. Other elements are packed from their codes. All other weights are adapted
without changing a value:

* **Shape.** K grows to a multiple of 64 and of the group, N to a multiple of 64. Added rows of an existing
  group hold the group's zero point as code; added groups and columns have scale 0 and zero point and codes of
  the element's midpoint. Either way the added weights are exactly 0. A layer with one group keeps one group.
* **Granularity.** A group of a multiple of 32 is refined to the largest of 128, 64, 32 that divides it by
  repeating rows of scales and zeros. Scales of a tensor or of blocks are repeated for every column.
* **Activation order.** When sorting the channels by g_idx (stably) gives contiguous groups of the stated
  size, the rows are stored sorted and the activations are gathered in the same order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.core.weight import Grid, QuantizedWeight, trivial_g_idx
from marlinq.formats import StoredWeight, transcode
from marlinq.formats.layouts.marlin import Marlin, permute_scales
from marlinq.formats.stored_values import nan_codes
from marlinq.kernels.contract import weight_formats
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.problem import GRANULARITIES
from marlinq.kernels.contract.weight_formats import WEIGHT_FORMATS, WeightFormat
from marlinq.kernels.launch.tile_words import SOURCES as TILED_FROM
from marlinq.kernels.launch.tile_words import tile_words

KERNEL_LAYOUT = Marlin()
"""The layout whose words and scales kernels read as stored."""

KERNEL_FORMAT = weight_formats.INT4
"""The weight format whose words :data:`KERNEL_LAYOUT` holds."""

PAD_MULTIPLE = 64
"""K and N of a stored operand are multiples of this."""

_REFINED = sorted((each for each in GRANULARITIES if each.kind == "group"), reverse=True)


def operand_refusal(
    weight: StoredWeight | QuantizedWeight | Grid, weight_format: WeightFormat | None = None
) -> str | None:
    """Why no operand can hold ``weight``, or None.

    ``weight_format``: format of sparse weights; None is the element's own format. Codes are not checked.
    """
    scheme = weight.scheme
    reason = scheme_refusal(scheme)
    if reason is not None:
        return reason
    if weight_format is not None and weight_format.sparsity is not None:
        if scheme.stores_zeros:
            return "zero points; sparse weights have none in kernels"
        if scheme.act_order:
            return "activation order; it would move channels between spans of sparse weights"
    if scheme.act_order:
        size = scheme.channels_per_group(weight.in_features)
        groups = weight.g_idx.sort().values
        if not torch.equal(groups, trivial_g_idx(weight.in_features, size, groups.device)):
            return f"activation order: sorting g_idx does not give groups of {size} channels each"
    return None


def scheme_refusal(scheme: Scheme) -> str | None:
    """Why no kernel multiplies with weights of ``scheme``, whatever their values, or None."""
    weight_format = WEIGHT_FORMATS.get(scheme.element.name)
    if weight_format is None or weight_format.codec is None:
        return f"{scheme.element.name} weights; kernels multiply {', '.join(_multiplied())}"
    if scheme.stores_zeros and not weight_format.stores_zeros:
        return f"zero points; {weight_format.name} weights have none in kernels"
    if scheme.tensor_scale != "none" and weight_format == KERNEL_FORMAT:
        return "a second-level scale; the kernel has scales of one level"
    if kernel_granularity(scheme) is None:
        return (
            f"{scheme.granularity.describe()}: neither one scale per channel nor groups of a multiple of 32"
        )
    return None


def _multiplied() -> list[str]:
    """Names of the elements that have kernels."""
    return [name for name, each in WEIGHT_FORMATS.items() if each.codec is not None and not each.sparsity]


def format_of(scheme: Scheme) -> WeightFormat:
    """The weight format that holds a scheme's element, for a weight that is not refused."""
    return WEIGHT_FORMATS[scheme.element.name]


def operand_shape(
    weight: StoredWeight | QuantizedWeight, weight_format: WeightFormat
) -> tuple[int, int, Granularity]:
    """K and N after padding and the kernel's granularity, for a weight that is not refused."""
    granularity = kernel_granularity(weight.scheme) or Granularity.channel()
    step = max(weight_format.channel_multiple, granularity.channels)
    return _round_up(weight.in_features, step), _round_up(weight.out_features, PAD_MULTIPLE), granularity


def stored_operand(
    stored: StoredWeight,
    dtype: torch.dtype,
    device: torch.device,
    weight_format: WeightFormat | None = None,
) -> Operand:
    """The operand that holds exactly the weights of ``stored``; scales are rounded to ``dtype``.

    Words and scales in the kernels' layout and group size are used as stored. Other words are transcoded on
    ``device``, on a GPU by one launch. Only padding, activation order and masks of sparse layouts need
    unpacked codes.

    Args:
        stored: the weight, of any K, N and layout.
        dtype: dtype of the activations, and so of scales and zeros.
        device: device of the operand.
        weight_format: format of sparse weights; None is the element's own format.

    Raises:
        UnsupportedError: :func:`operand_refusal` has a reason, or a scale overflows ``dtype``.
    """
    weight_format = weight_format or format_of(stored.scheme)
    reason = operand_refusal(stored, weight_format)
    if reason is not None:
        raise UnsupportedError(f"{stored.name}: {reason}")
    scheme = stored.scheme
    k, n = stored.in_features, stored.out_features
    rows, columns, granularity = operand_shape(stored, weight_format)
    whole = stored.layout.mask_key is None and (rows, columns) == (k, n)
    if weight_format != KERNEL_FORMAT or scheme.act_order or not whole:
        weight = stored.weight(device)
        return marlin_operand(
            weight, dtype, name=stored.name, weight_format=weight_format, checked=stored.checked
        )
    zeros = None
    if stored.layout.family == KERNEL_LAYOUT.family and granularity == scheme.granularity:
        scales = stored.scales
    else:
        scales = permute_scales(_regrouped(stored.grid, stored.grid.scales, granularity))
    if scheme.stores_zeros:
        regrouped = _regrouped(stored.grid, stored.grid.zeros, granularity)
        zeros = permute_scales(regrouped).to(device=device, dtype=dtype)
    return Operand(
        format=KERNEL_FORMAT,
        words=_kernel_words(stored, device),
        scales=_cast_scales(scales, dtype, stored.name).to(device),
        zeros=zeros,
        order=None,
        granularity=granularity,
        in_features=k,
        out_features=n,
    )


def marlin_operand(
    q: QuantizedWeight,
    dtype: torch.dtype,
    *,
    name: str = "weight",
    weight_format: WeightFormat | None = None,
    checked: bool = False,
) -> Operand:
    """The operand that holds exactly the weights of ``q``, on its device; scales are rounded to ``dtype``.

    Args:
        q: the weight, of any K and N.
        dtype: dtype of the activations, and so of scales and zeros.
        name: name of the module in error messages.
        weight_format: format of sparse weights; None is the element's own format.
        checked: whether codes of NaN were refused already.

    Raises:
        UnsupportedError: :func:`operand_refusal` has a reason, a scale overflows ``dtype``, or the codes
            break the format's sparsity.
    """
    weight_format = weight_format or format_of(q.scheme)
    reason = operand_refusal(q, weight_format)
    if reason is None and weight_format.sparsity is not None:
        reason = weight_format.sparsity.refusal(q.used())
    if reason is not None:
        raise UnsupportedError(f"{name}: {reason}")
    codes, order = q.codes, None
    if not q.has_trivial_g_idx:
        order = torch.argsort(q.g_idx, stable=True)
        codes = codes[order]
    rows, columns, granularity = operand_shape(q, weight_format)
    if not checked:
        _check_codes(q, name)
    # Widened, since few torch operations take 8-bit floats.
    wide = q.scales if q.scales.itemsize > 1 else q.scales.to(torch.float32)
    scales, zeros = (q.per_output(_regrouped(q, values, granularity)) for values in (wide, q.zeros))
    factor = weight_format.scale_factor(dtype)
    if q.tensor_scale is not None or factor != 1:
        # The product of both levels is rounded only once, to the dtype.
        second = 1.0 if q.tensor_scale is None else q.tensor_scale.to(torch.float64)
        wide = scales.to(torch.float64) * factor
        scales = (wide / second if q.tensor_scale_divides else wide * second).to(torch.float32)
    scales = _cast_scales(scales, dtype, name)
    _check_range(scales, weight_format, name)
    k, n = q.in_features, q.out_features
    size = granularity.channels_per_group(rows)
    groups = rows // size
    middle = q.element.midpoint
    scales = _grow(scales, groups, columns, 0)
    zeros = _grow(zeros, groups, columns, middle)
    codes = _grow(codes, rows, columns, middle)
    if rows > k:
        row_groups = trivial_g_idx(rows, size)[k:].long()
        codes[k:] = zeros[row_groups.to(zeros.device)]
    if order is not None:
        order = torch.nn.functional.pad(order, (0, rows - k), value=-1).to(torch.int32)
    return Operand(
        format=weight_format,
        words=weight_format.pack(codes),
        scales=permute_scales(scales),
        zeros=None if not q.scheme.stores_zeros else permute_scales(zeros.to(dtype)),
        order=order,
        granularity=granularity,
        in_features=k,
        out_features=n,
    )


def _kernel_words(stored: StoredWeight, device: torch.device) -> Tensor:
    """The words in the kernels' order on ``device``, for a weight that needs no padding."""
    words, family = stored.words.to(device), stored.layout.family
    if device.type == "cuda" and family in TILED_FROM:
        return tile_words(words, family, stored.in_features, stored.out_features)
    return transcode(words, stored.spec, stored.layout, KERNEL_LAYOUT)


def kernel_granularity(scheme: Scheme) -> Granularity | None:
    """The granularity of a kernel's configuration, or None where no kernel takes such groups."""
    granularity = scheme.granularity
    if granularity.channels == 0:
        return Granularity.channel()
    smallest = WEIGHT_FORMATS[scheme.element.name].smallest_group
    finer = (each for each in _REFINED if each.channels >= smallest)
    return next((each for each in finer if granularity.channels % each.channels == 0), None)


def _regrouped(q: QuantizedWeight | Grid, values: Tensor, granularity: Granularity) -> Tensor:
    """``values``, the scales or zero points of ``q``, a row for each group of ``granularity``."""
    if granularity.channels in (0, q.channels_per_group):
        return values
    # Also right where the weight's last group is short.
    first_channels = torch.arange(0, q.in_features, granularity.channels, device=values.device)
    return values[first_channels // q.channels_per_group]


def _cast_scales(scales: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if scales.dtype == dtype:
        return scales
    cast = scales.to(dtype)
    # The check waits for the GPU, so it is made only if the dtype's range is narrower.
    narrower = torch.finfo(dtype).max < torch.finfo(scales.dtype).max
    if narrower and bool((torch.isfinite(scales) & ~torch.isfinite(cast)).any()):
        largest = float(scales[torch.isfinite(scales)].abs().max())
        raise UnsupportedError(
            f"{name}: a scale of {largest:.6g} overflows {str(dtype).removeprefix('torch.')}; run in bfloat16"
        )
    return cast


def _check_codes(q: QuantizedWeight, name: str) -> None:
    """Refuse codes of NaN, which kernels would multiply as numbers."""
    for code in nan_codes(q.element):
        if bool((q.codes == code).any()):
            raise UnsupportedError(f"{name}: a weight is NaN (code {code:#04x} of {q.element.name})")


def _check_range(scales: Tensor, weight_format: WeightFormat, name: str) -> None:
    """Refuse bfloat16 scales that would overflow when kernels multiply them by the format's power of two."""
    bound = weight_format.largest_bfloat16_scale
    if scales.dtype == torch.bfloat16 and math.isfinite(bound) and bool((scales.abs() >= bound).any()):
        raise UnsupportedError(
            f"{name}: a scale of {float(scales.abs().max()):.6g}; {weight_format.name} kernels take scales "
            f"below {bound:g}: run in float16, or with the dense operator"
        )


def _grow(matrix: Tensor, rows: int, columns: int, value: float) -> Tensor:
    """``matrix`` in the upper left corner of [rows, columns] filled with ``value``."""
    if tuple(matrix.shape) == (rows, columns):
        return matrix
    grown = matrix.new_full((rows, columns), value)
    grown[: matrix.shape[0], : matrix.shape[1]] = matrix
    return grown


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
