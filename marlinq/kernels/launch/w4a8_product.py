"""Products of 4-bit weights with activations rounded to FP8: one launch rounds them, one multiplies."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.kernels.contract.arguments import Fp8Arguments
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.operand import Operand
from marlinq.kernels.contract.problem import Problem
from marlinq.kernels.driver.cuda_driver import Function, Launches, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.handover_memory import handover_memory
from marlinq.kernels.driver.module import load_kernel
from marlinq.kernels.driver.tensor_maps import scaled_activation_maps, weight_maps
from marlinq.kernels.launch.eight_bit_product import quantize_fragments, row_instantiation
from marlinq.kernels.launch.prepared import address
from marlinq.kernels.variants.warpgroup_fp8 import GROUP, WarpgroupFp8Config, configuration, refusal

Rounded = tuple[Tensor, Tensor, Tensor]
"""Activations as :func:`~marlinq.kernels.launch.eight_bit_product.quantize_fragments` returns them."""


def fp8_arguments(
    rounded: Rounded,
    weight: Operand,
    bias: Tensor | None,
    out: Tensor,
    config: WarpgroupFp8Config,
    *,
    dependent: bool = False,
) -> Fp8Arguments:
    """The kernel's parameters; ``partials`` and ``flags`` are null until ``share`` sets them.

    Args:
        rounded: activations.
        weight: symmetric INT4 weight in groups of 128.
        bias: [N'] in the dtype of ``out``, or None.
        out: [M, N'] of the dtype of the weight's scales.
        config: configuration that is launched.
        dependent: whether the kernel starts before the one ahead of it has ended, and waits for it.
    """
    k, n = weight.padded_shape
    codes, scales, sums = rounded
    m, parts = len(out), len(scales) if scales.dim() == 2 else 1
    pitch = -(-scales.shape[-1] // 4) * 4
    maps = weight_maps(
        *(weight.words.data_ptr(), weight.scales.data_ptr(), 0, n, k, len(weight.scales)),
        *(config.tile_n // 64, config.rows, weight.format.tile_words, weight.format.row_channels),
    )
    return Fp8Arguments(
        scaled_activation_maps(
            *(codes.data_ptr(), scales.data_ptr(), sums.data_ptr()), m, k, parts, pitch, config.tile_m
        ),
        maps,
        *(weight.scales.data_ptr(), address(bias), out.data_ptr(), m, n, k, out.stride(0), dependent),
    )


@lru_cache(maxsize=1024)
def _load(instantiation: Instantiation, shared_bytes: int, device_index: int) -> Function:
    return load_kernel(instantiation, device_numbers(device_index).architecture, device_index, shared_bytes)


@lru_cache(maxsize=8192)
def _configuration(problem: Problem, device_index: int, chunk_scales: bool) -> WarpgroupFp8Config:
    device = device_numbers(device_index)
    reason = refusal(problem, device)
    if reason is not None:
        raise UnsupportedError(reason)
    return configuration(problem, device, chunk_scales=chunk_scales)


def instantiations(weight: Operand, device_index: int) -> list[Instantiation]:
    """The kernels that products with ``weight`` launch; they are the same for all shapes."""
    config = _configuration(weight.problem(1), device_index, False)
    return [
        row_instantiation(weight.scales.dtype, 0, fragments=True),
        config.instantiation(weight.problem(1)),
    ]


def w4a8_product(
    x: Tensor,
    weight: Operand,
    bias: Tensor | None,
    group: int = 0,
    config: WarpgroupFp8Config | None = None,
) -> Tensor:
    """``e4m3(x) @ W + bias``, [M, N'] in ``x.dtype``, on the device and current stream of ``x``.

    Args:
        x: [M, K'] float16 or bfloat16, the dtype of the weight's scales.
        weight: symmetric INT4 weight in groups of 128, without an order.
        bias: [N'] in ``x.dtype``, or None.
        group: channels of a row that share a scale: 0 for all, or 128, which takes longer.
        config: overrides the configuration.

    Raises:
        UnsupportedError: the kernel does not take the GPU or the weight.
    """
    m, n = len(x), weight.padded_shape[1]
    out = x.new_empty((m, n))
    if not m:
        return out
    chosen = config or _configuration(weight.problem(m), x.device.index, group == GROUP)
    launch_product(quantize_fragments(x, group), weight, bias, out, chosen, dependent=True)
    return out


def launch_product(
    rounded: Rounded,
    weight: Operand,
    bias: Tensor | None,
    out: Tensor,
    config: WarpgroupFp8Config,
    *,
    dependent: bool = False,
) -> None:
    """Multiply rounded activations, on the current stream; arguments as :func:`fp8_arguments`."""
    index, problem = out.device.index, weight.problem(len(out))
    arguments = fp8_arguments(rounded, weight, bias, out, config, dependent=dependent)
    shared = config.shared_bytes(problem)
    function = _load(config.instantiation(problem), shared, index)
    with on_device(index):
        handover = config.handover(problem)
        if handover is not None:
            sums, flags = handover_memory(handover, index)
            arguments.share(sums.data_ptr(), flags)
        grid = config.grid(problem)
        Launches(function, grid, config.threads, shared, arguments, dependent=dependent).take().start()
