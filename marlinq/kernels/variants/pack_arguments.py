"""Kernel parameters from the tensors of a product."""

from __future__ import annotations

from marlinq.kernels.contract.arguments import MappedArguments, PlainArguments, WarpgroupArguments
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.driver.tensor_maps import activation_maps, weight_maps


def plain_arguments(operands: ProductTensors, dependent: bool) -> PlainArguments:
    """Parameters of a kernel that takes ``x`` by pointer and stride."""
    return PlainArguments(
        operands.x.data_ptr(),
        operands.weight.words.data_ptr(),
        *_addresses(operands),
        *_extents(operands),
        operands.x.stride(0),
        operands.out.stride(0),
        dependent,
    )


def mapped_arguments(
    operands: ProductTensors, tile_m: int, tiles: int, rows: int, dependent: bool
) -> MappedArguments:
    """Parameters of the bulk kernel, which fills stages of its ring by tensor copies (TMA).

    Args:
        operands: the product's tensors.
        tile_m: rows of activations in a stage.
        tiles: 64-column tiles of weights in a stage.
        rows: rows of 16 channels in a stage.
        dependent: whether the launch overlaps with the previous kernel of the stream.
    """
    return MappedArguments(*_mapped(operands, tile_m, tiles, rows, dependent))


def warpgroup_arguments(
    operands: ProductTensors, tile_m: int, tiles: int, rows: int, dependent: bool
) -> WarpgroupArguments:
    """Parameters of the warpgroup kernel; ``partials`` and ``flags`` are null until ``share`` sets them.

    Arguments are those of :func:`mapped_arguments`.
    """
    return WarpgroupArguments(*_mapped(operands, tile_m, tiles, rows, dependent))


def _mapped(
    operands: ProductTensors, tile_m: int, tiles: int, rows: int, dependent: bool
) -> tuple[object, ...]:
    m, n, k = _extents(operands)
    x = operands.x
    scales, zeros, bias, out = _addresses(operands)
    maps = weight_maps(
        operands.weight.words.data_ptr(),
        scales,
        zeros,
        n,
        k,
        operands.weight.scales.shape[0],
        tiles,
        rows,
        operands.weight.format.tile_words,
        operands.weight.format.row_channels,
    )
    return (
        activation_maps(x.data_ptr(), m, k, x.stride(0), tile_m),
        maps,
        scales,
        zeros,
        bias,
        out,
        m,
        n,
        k,
        operands.out.stride(0),
        dependent,
    )


def _addresses(operands: ProductTensors) -> tuple[int, int, int, int]:
    """Addresses of scales, zero points, bias and result; 0 for None."""
    return (
        operands.weight.scales.data_ptr(),
        0 if operands.weight.zeros is None else operands.weight.zeros.data_ptr(),
        0 if operands.bias is None else operands.bias.data_ptr(),
        operands.out.data_ptr(),
    )


def _extents(operands: ProductTensors) -> tuple[int, int, int]:
    """M, N and K."""
    return operands.x.shape[0], operands.weight.padded_shape[1], operands.x.shape[1]
