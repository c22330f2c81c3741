"""A vector for each layer from a token's projected embedding and a table (``cuda/step/layer_inputs.cuh``)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation, Parameters
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR, Prepared, address, check_rows
from marlinq.kernels.step.residual import RowNorm

_WARPS = 4
_WIDEST = 1024


@dataclass(frozen=True, eq=False)
class LayerInputWeights:
    """Parameters of the layers' vectors, besides the projection.

    Attributes:
        table: [vocabulary, layers * P], a vector of each token for each layer.
        table_scale: factor on those vectors.
        norm: norm of each P projected channels, with a weight [P] or none, without a bias.
        width: P.
        scale: factor on the sum of both.
    """

    table: Tensor
    table_scale: float
    norm: RowNorm
    width: int
    scale: float


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("tokens", "table", "x", "weight", "out")),
        ("layers", ctypes.c_int),
        *((name, ctypes.c_longlong) for name in ("x_stride", "out_stride")),
        *((name, ctypes.c_float) for name in ("table_scale", "scale", "eps", "offset")),
    )


def layer_inputs_refusal(width: int, norm: str, *, bias: bool) -> str | None:
    """Why the kernel can't make vectors of ``width`` channels with a norm of this kind, in one clause, or
    None."""
    if width % VECTOR or width > _WIDEST:
        return f"vectors of {width} channels; the kernel takes multiples of {VECTOR} to {_WIDEST}"
    return "a norm with a mean or a bias" if norm == "LAYER" or bias else None


def layer_inputs(tokens: Tensor, x: Tensor, out: Tensor, weights: LayerInputWeights) -> Prepared:
    """``out = scale * (norm(x) + table_scale * table[tokens])``, for each layer's P channels.

    If launched dependently, the kernel may read ``tokens`` and the table while the stream's previous kernels
    still run.

    Args:
        tokens: int64 [M], contiguous.
        x: [M, layers * P], projected embeddings; further columns are padding.
        out: [M, layers * P]; written.
        weights: parameters and sizes.

    Raises:
        ValueError: a tensor has a dtype or shape that the kernel can't load or compute.
    """
    check_rows(x=x, out=out, table=weights.table)
    m, columns = out.shape
    width, norm = weights.width, weights.norm
    refused = layer_inputs_refusal(width, norm.kind, bias=norm.bias is not None)
    if refused is not None:
        raise ValueError(refused)
    if columns % width or weights.table.shape[1] != columns or not weights.table.is_contiguous():
        raise ValueError(f"table: expected rows of {columns}, found {list(weights.table.shape)}")
    if x.shape[0] != m or x.shape[1] < columns or tokens.shape != (m,) or tokens.dtype != torch.int64:
        raise ValueError(f"x, tokens: {list(x.shape)} and {list(tokens.shape)} for {list(out.shape)}")
    layers = columns // width
    parameters: Parameters = (
        ("Element", ELEMENTS[out.dtype]),
        ("P", width),
        ("WARPS", _WARPS),
        ("NORM", f"Norm::{norm.kind}"),
    )
    arguments = _Arguments(
        *(tokens.data_ptr(), weights.table.data_ptr(), x.data_ptr(), address(norm.weight), out.data_ptr()),
        *(layers, x.stride(0), out.stride(0), weights.table_scale, weights.scale, norm.eps, norm.offset),
    )
    instantiation = Instantiation("step/layer_inputs.cuh", "step_layer_inputs", parameters)
    return Prepared(instantiation, m * -(-layers // _WARPS), 32 * _WARPS, arguments)
