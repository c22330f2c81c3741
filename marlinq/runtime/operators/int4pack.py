"""Torch's packed INT4 product for CPUs: an eighth of the bytes of float32, operands in BF16.

``aten::_weight_int4pack_mm_for_cpu`` computes, in float32 from operands in ``dtype``,

    y[m, n] = sum over k of x[m, k] * ((codes[n, k] - 8) * scale[g, n] + offset[g, n])

with x, scales, offsets and y of one dtype. It is vectorised for BF16 alone: with float32 or float16 operands
the same product runs scalar code, ten times slower than a dense one. So this operator rounds to BF16:

* **Scales**, by at most 2**-8 of their value; not at all where they are stored in BF16.
* **Offsets**, (8 - zero) * scale: exactly 0 for symmetric weights, else rounded by at most 2**-8 * 7 scales
  (a zero point of 0 gives 8 scales, which is exact). So a symmetric weight is off by at most 2**-8 of its
  value, an asymmetric one by 2**-8 * (|code - zero| + 7) steps: less than an eleventh of a step.
* **Activations and results**, by at most 2**-8 each, as in a model that runs in BF16. What stands between the
  products (the residual stream, norms, attention) keeps the model's dtype.

The operator therefore asks for a setting that is not exact, and is only taken where it is clearly faster than
the dequantised weight, by a measurement on this machine.

Small products run on one thread where more threads measure little faster: waking a thread takes longer than
the 20 us of a 576 x 576 product, and waiting for a displaced thread takes milliseconds.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.formats import StoredWeight
from marlinq.runtime.operators.cpu_timing import Product, cold_copies, seconds_in_turn
from marlinq.runtime.operators.operator import Estimate, Operator, Setting
from marlinq.runtime.threads import threads_at_most

GROUP_SIZES = (256, 128, 64, 32)
"""Group sizes of torch's product."""

_COLUMNS = 16  # output channels of a block that torch packs
_MIDPOINT = 8  # number that the product subtracts from each code
_DTYPES = (torch.float32, torch.bfloat16)
_OPERATIONS = ("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu")

_FEW_ROWS = 4
"""Rows up to which a product uses the number of threads that is fastest for one row."""

_THREADS_GAIN = 1.2
"""Speed-up of all threads over one from which they are used."""

LEAST_GAIN = 1.2
"""Speed-up over the dequantised weight from which it is chosen, since it rounds to BF16."""


class Int4PackLinear(nn.Module):
    """``y = x @ W.T + b`` through torch's packed INT4 product; drop-in for ``nn.Linear``.

    ``forward`` takes x [..., K] of any float dtype and returns [..., N] in the same; the product itself runs
    in BF16, the bias is added in x's dtype. Buffers are not part of a state dict.

    Args:
        weight: a weight that :class:`Int4Pack` does not refuse.
        bias: [N] in the dtype of the activations, or None.
        threads: number of threads for up to four rows; None for all threads.
    """

    words: Tensor
    scales_and_offsets: Tensor
    order: Tensor | None
    bias: Tensor | None

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None = None, *, threads: int | None = None
    ) -> None:
        super().__init__()
        self.threads = threads
        self.in_features = weight.in_features
        self.out_features = weight.out_features
        self.group_size = product_group_size(weight.scheme.granularity, weight.in_features) or 0
        order = None
        codes, size = weight.codes, weight.scheme.channels_per_group(weight.in_features)
        if not weight.has_trivial_g_idx:
            order = weight.g_idx.argsort(stable=True)
            codes = codes[order]
        first_channels = torch.arange(0, self.in_features, self.group_size)
        groups = first_channels // size
        scales = weight.scales.to(torch.bfloat16)
        if bool((torch.isfinite(weight.scales) & ~torch.isfinite(scales)).any()):
            raise UnsupportedError("a scale overflows bfloat16")
        offsets = (_MIDPOINT - weight.zeros.float()) * scales.float()
        pairs = torch.stack((scales, offsets.to(torch.bfloat16)), dim=-1)[groups]
        words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.t().to(torch.int32).contiguous(), 1)
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("scales_and_offsets", pairs.contiguous(), persistent=False)
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] to [..., N], in the dtype of x."""
        rows = x.reshape(-1, self.in_features)
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        narrow = rows.to(torch.bfloat16).contiguous()
        with threads_at_most(self.threads if rows.shape[0] <= _FEW_ROWS else None):
            y = _product(narrow, self.words, self.group_size, self.scales_and_offsets)
        y = y.to(x.dtype)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"group_size={self.group_size}, act_order={self.order is not None}, bias={self.bias is not None}"
        )


class Int4Pack(Operator):
    """:class:`Int4PackLinear`, on a CPU, where it is measured to be faster than the dequantised weight."""

    name = "int4pack"
    rounds_to = "bfloat16"
    device_types = ("cpu",)

    def refusal(self, stored: StoredWeight, setting: Setting) -> str | None:
        if setting.device.type != "cpu":
            return f"torch's packed INT4 product for CPUs does not run on {setting.device.type}"
        if not all(hasattr(torch.ops.aten, operation) for operation in _OPERATIONS):
            return f"torch {torch.__version__} has no packed INT4 product for CPUs"
        scheme, k, n = stored.scheme, stored.in_features, stored.out_features
        if scheme.element != INT4:
            return f"{scheme.element.name} weights; torch's packed product multiplies {INT4.name}"
        if not scheme.per_output:
            return f"{scheme.describe()}; torch's packed product has scales per output channel"
        if setting.dtype not in _DTYPES:
            return f"it multiplies in bfloat16, the model runs in {dtype_name(setting.dtype)}"
        if setting.exact and setting.dtype != torch.bfloat16:
            return f"it multiplies in bfloat16, exact {dtype_name(setting.dtype)} products were asked for"
        if n % _COLUMNS:
            return f"{n} output channels are no multiple of {_COLUMNS}"
        if product_group_size(scheme.granularity, k) is None:
            return f"no group of 32, 64, 128 or 256 divides {scheme.granularity.describe()} in {k} channels"
        if scheme.act_order:
            size = scheme.channels_per_group(k)
            if not torch.equal(stored.g_idx.sort().values, trivial_g_idx(k, size)):
                return f"activation order: sorting g_idx does not give groups of {size} channels each"
        return None

    def estimate(self, stored: StoredWeight, setting: Setting, rows: int) -> Estimate:
        k, n = stored.in_features, stored.out_features
        group_size = product_group_size(stored.scheme.granularity, k) or 0
        packed, dense, threads = measure(rows, k, n, group_size, setting.dtype, torch.get_num_threads())
        alone = " on one thread" if threads == 1 else ""
        times = f"{packed * 1e6:.0f} us for {k} x {n} measured{alone}, {dense * 1e6:.0f} us dequantised"
        if packed * LEAST_GAIN > dense:
            return Estimate(None, f"not {LEAST_GAIN:g} times faster: {times}")
        return Estimate(packed, f"torch's packed INT4 product, rounded to bfloat16: {times}")

    def build(self, stored: StoredWeight, bias: Tensor | None, setting: Setting) -> nn.Module:
        moved = None if bias is None else bias.to(setting.device, setting.dtype)
        k, n = stored.in_features, stored.out_features
        group_size = product_group_size(stored.scheme.granularity, k) or 0
        threads = measure(1, k, n, group_size, setting.dtype, torch.get_num_threads()).threads
        try:
            return Int4PackLinear(stored.weight(), moved, threads=threads)
        except UnsupportedError as error:
            raise UnsupportedError(f"{stored.name}: {error}; load with --dtype float32") from None


def product_group_size(granularity: Granularity, in_features: int) -> int | None:
    """The largest group of torch's product into which the weight's groups can be split, or None."""
    if granularity.outputs != 1:
        return None
    whole = granularity.channels or in_features
    return next((size for size in GROUP_SIZES if whole % size == 0 and in_features % size == 0), None)


class Measured(NamedTuple):
    """Times of products on this machine.

    Attributes:
        packed: seconds of a packed product, with the faster number of threads.
        dense: seconds of a product with the dequantised weight.
        threads: 1 where more threads are hardly faster; None for all threads.
    """

    packed: float
    dense: float
    threads: int | None


@cache
def measure(
    rows: int, in_features: int, out_features: int, group_size: int, dtype: torch.dtype, threads: int
) -> Measured:
    """Times of packed and of dense products, measured once a process for each set of arguments.

    Args:
        rows: number of rows of the activations.
        in_features: K.
        out_features: N.
        group_size: channels of a group of the packed product.
        dtype: dtype of the activations and of the dequantised weight.
        threads: number of torch's threads; part of the problem.
    """
    n, k = out_features, in_features
    x = torch.ones(rows, k, dtype=dtype)
    pairs = torch.ones(k // group_size, n, 2, dtype=torch.bfloat16)
    codes = torch.full((n, k), _MIDPOINT, dtype=torch.int32)
    copies = cold_copies(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1))

    def packed_products(limit: int | None) -> list[Product]:
        def product(words: Tensor) -> Tensor:
            with threads_at_most(limit):
                y = _product(x.to(torch.bfloat16), words, group_size, pairs)
            return y.to(dtype)

        return [partial(product, copy) for copy in copies]

    with torch.no_grad():
        dense = [
            lambda weight=copy: F.linear(x, weight) for copy in cold_copies(torch.ones(n, k, dtype=dtype))
        ]
        if threads == 1:
            alone, dense_seconds = seconds_in_turn(packed_products(None), dense)
            return Measured(alone, dense_seconds, None)
        together, alone, dense_seconds = seconds_in_turn(packed_products(None), packed_products(1), dense)
    if alone > _THREADS_GAIN * together:
        return Measured(together, dense_seconds, None)
    return Measured(alone, dense_seconds, 1)


def _product(x: Tensor, words: Tensor, group_size: int, scales_and_offsets: Tensor) -> Tensor:
    y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, words, group_size, scales_and_offsets)
    return y
