"""Products of FP8 weights with activations quantised to FP8.

One kernel quantises the activations, one orders the weight's bytes, and cuBLAS multiplies.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.driver.cuda_driver import Function, Launches, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR, address

ROW_THREADS, PLAIN_THREADS = 256, 256
_ROWS_TOGETHER = 4
GROUP = 128
"""Channels of an activation row that share a scale, where weights have groups."""
LARGEST, LEAST = 448.0, 1e-30
"""Largest value of E4M3; and a lower bound of the magnitude that a scale is computed from, so that none is
0."""


class RowArguments(ctypes.Structure):
    """The parameters of ``cuda/kernels/quantize_rows.cuh``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "given", "sums")),
        ("k", ctypes.c_int),
        ("pitch", ctypes.c_int),
        ("x_stride", ctypes.c_longlong),
    )


class PlainArguments(ctypes.Structure):
    """The parameters of ``cuda/kernels/plain_bytes.cuh``."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("plain", ctypes.c_void_p),
        ("k", ctypes.c_int),
        ("n", ctypes.c_int),
    )


def row_instantiation(
    dtype: torch.dtype, group: int, *, given: bool = False, fragments: bool = False
) -> Instantiation:
    """The kernel that quantises rows.

    Args:
        dtype: dtype of the activations.
        group: channels that share a scale, 0 for all.
        given: whether all activations share a scale that is known.
        fragments: whether codes lie in the order of :func:`quantize_fragments`, and sums are written.
    """
    parameters = (
        ("Element", ELEMENTS[dtype]),
        ("THREADS", ROW_THREADS),
        ("GROUP", group),
        ("GIVEN", given),
        ("FRAGMENTS", fragments),
    )
    return Instantiation("kernels/quantize_rows.cuh", "quantize_rows", parameters)


def instantiations(weight: Operand) -> list[Instantiation]:
    """The kernels that products with ``weight`` launch, besides cuBLAS's."""
    group = weight.granularity.for_channels(weight.padded_shape[0]).channels
    given = weight.input_scale is not None
    return [row_instantiation(weight.scales.dtype, group, given=given), plain_instantiation()]


def plain_instantiation() -> Instantiation:
    """The kernel that orders a weight's bytes for cuBLAS."""
    return Instantiation("kernels/plain_bytes.cuh", "plain_bytes", (("THREADS", PLAIN_THREADS),))


@lru_cache(maxsize=64)
def _function(instantiation: Instantiation, device_index: int) -> Function:
    return load_kernel(instantiation, device_numbers(device_index).architecture, device_index)


def quantized_shapes(m: int, k: int, group: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Shapes of the codes [m, k] and of the scales of quantised activations.

    With groups, scales have rows up to the next multiple of four, as cuBLAS requires; rows from m on are not
    initialised.
    """
    rows = -(-m // _ROWS_TOGETHER) * _ROWS_TOGETHER if group else m
    return (rows, k), (k // group, rows) if group else (m,)


def quantize_rows(x: Tensor, group: int, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Activations as E4M3, and float32 scales of each row, or of each row and group, in one launch.

    Args:
        x: [M, K] float16 or bfloat16 on a GPU, or of any dtype on a CPU; K a multiple of 16 and of ``group``.
        group: channels that share a scale, 128; 0 for a row.
        given: scale of all activations, float32 []; None: scales are computed from ``x``. Only where
            ``group`` is 0.

    Returns:
        Codes float8_e4m3fn [M, K], and scales [M, 1]; with groups [M, K / group], on a GPU with strides
        (1, M) and M the next multiple of four.
    """
    if not x.is_cuda:
        return _reference_rows(x, group, given)
    codes, scales = _launch_rows(x, group, given, row_instantiation(x.dtype, group, given=given is not None))
    return codes, scales.t() if group else scales[:, None]


def quantize_fragments(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`quantize_rows` on a GPU, for ``cuda/kernels/warpgroup_fp8.cuh``.

    Returns:
        Codes, of which every 32 channels lie in the order of ``cuda/codec/int4_e4m3.cuh``; scales float32
        [K / group, M], M the next multiple of four, or [M]; sums in ``x.dtype`` [M, :func:`sums_width`].
    """
    sums = x.new_empty(len(x), sums_width(x.shape[1]))
    codes, scales = _launch_rows(x, group, None, row_instantiation(x.dtype, group, fragments=True), sums)
    return codes, scales, sums


def sums_width(k: int) -> int:
    """Elements of a row of sums: a pair for each of 32 groups, for every 32 groups or part of them."""
    return 64 * -(-k // (32 * GROUP))


def _launch_rows(
    x: Tensor,
    group: int,
    given: Tensor | None,
    instantiation: Instantiation,
    sums: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    if x.stride(1) != 1 or x.stride(0) % VECTOR or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    shape, of_scales = quantized_shapes(m, k, group)
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(of_scales, dtype=torch.float32, device=x.device)
    arguments = RowArguments(
        *(x.data_ptr(), codes.data_ptr(), scales.data_ptr(), address(given), address(sums)),
        *(k, shape[0], x.stride(0)),
    )
    index = x.device.index
    with on_device(index):
        launches = Launches(_function(instantiation, index), m, ROW_THREADS, 0, arguments, dependent=False)
        launches.take().start()
    return codes, scales


def _reference_rows(x: Tensor, group: int, given: Tensor | None) -> tuple[Tensor, Tensor]:
    m, k = x.shape
    parts = x.float().view(m, -1, group or k)
    if given is None:
        amax = parts.abs().amax(-1, keepdim=True).clamp(min=LEAST)
        # Both sides are tensors: torch divides a number by a tensor through a reciprocal, which rounds twice.
        scales, by = amax / LARGEST, torch.full_like(amax, LARGEST) / amax
    else:
        scales = given.float().expand(m, 1, 1)
        by = 1.0 / scales
    codes = (parts * by).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(m, k)
    return codes, scales[..., 0]


def plain_bytes(weight: Operand) -> Tensor:
    """The weight's codes as float8_e4m3fn [N', K']."""
    k, n = weight.padded_shape
    if not weight.words.is_cuda:
        codes: Tensor = weight.format.values(weight.words, torch.float32)
        return codes.t().to(torch.float8_e4m3fn).contiguous()
    plain = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=weight.words.device)
    arguments = PlainArguments(weight.words.data_ptr(), plain.data_ptr(), k, n)
    index = plain.device.index
    with on_device(index):
        launches = Launches(
            *(_function(plain_instantiation(), index), n // 64 * -(-k // 128), PLAIN_THREADS, 0, arguments),
            dependent=False,
        )
        launches.take().start()
    return plain


def eight_bit_gemm(x: Tensor, weight: Operand, bias: Tensor | None, input_scale: Tensor | None) -> Tensor:
    """``x @ W + bias`` of activations rounded to E4M3, [M, N'] bfloat16.

    Weights with a scale per channel take activations with a scale per row, or ``input_scale``; weights in
    groups of 128 take activations with a scale per row and group.

    Args:
        x: [M, K'] bfloat16, on a GPU.
        weight: weight of FP8 E4M3.
        bias: [N'] bfloat16, or None.
        input_scale: scale of static activations, float32 []; None for dynamic ones.
    """
    group = weight.granularity.for_channels(weight.padded_shape[0]).channels
    codes, scales = quantize_rows(x, group, input_scale)
    natural = weight.format.in_order(weight.scales).float()
    # cuBLAS takes the second operand column-major.
    plain = plain_bytes(weight).t()
    if not group:
        return torch._scaled_mm(codes, plain, scales, natural, bias, out_dtype=torch.bfloat16)
    recipe = F.ScalingType.BlockWise1x128
    out: Tensor = F.scaled_mm(codes, plain, scales, recipe, natural.t(), recipe, output_dtype=torch.bfloat16)[
        : x.shape[0]
    ]
    return out if bias is None else out.add_(bias)
