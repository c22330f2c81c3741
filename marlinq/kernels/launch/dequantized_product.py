"""A product whose weight is dequantised first and then multiplied by torch (cuBLAS on a GPU)."""

from __future__ import annotations

import torch

from marlinq.kernels.contract.product_tensors import ProductTensors

WORKSPACE_BYTES = 256 << 20


def dequantized_gemm(operands: ProductTensors, workspace_bytes: int = WORKSPACE_BYTES) -> None:
    """Run ``out = x @ W + bias`` on the device and current stream of ``x``.

    A dense weight larger than ``workspace_bytes`` is multiplied in slices of columns, at least 64 each. While
    a slice is dequantised, about twice its bytes are in use.

    Args:
        operands: the product's tensors, with the strides that :func:`marlinq.kernels.launch.call.prepare`
            takes.
        workspace_bytes: bytes of a dense slice, about.
    """
    x, weight, bias, out = operands
    k, n = x.shape[1], out.shape[1]
    columns = min(n, max(64, workspace_bytes // (x.element_size() * k) // 64 * 64))
    for start in range(0, n, columns):
        part = slice(start, min(start + columns, n))
        dense = weight.columns(part).dequantize(x.dtype)
        if bias is None:
            torch.mm(x, dense, out=out[:, part])
        else:
            torch.addmm(bias[part], x, dense, out=out[:, part])
