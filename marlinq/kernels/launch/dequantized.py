"""A product by way of a dense weight: dequantised once, multiplied by torch (cuBLAS on a GPU)."""

from __future__ import annotations

import torch

from marlinq.kernels.contract.operands import Operands

WORKSPACE_BYTES = 256 << 20


def dequantized_gemm(operands: Operands, workspace_bytes: int = WORKSPACE_BYTES) -> None:
    """Run ``out = x @ W + bias`` on the device and current stream of ``x``.

    The dense weight comes from torch's allocator and goes back at once. A larger one than ``workspace_bytes``
    is multiplied in slices of columns, 64 at least; dequantising takes as much again for a moment.

    Args:
        operands: as :func:`marlinq.kernels.launch.call.prepare` takes them.
        workspace_bytes: bytes of the dense weight, about.
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
