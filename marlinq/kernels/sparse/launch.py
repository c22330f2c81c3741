"""Products with 2:4 sparse weights: launches of the sparse kernel, and torch arithmetic on a CPU."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cuda_driver import Function, Launches, on_device
from marlinq.kernels.driver.gpu import device_numbers
from marlinq.kernels.driver.module import load_kernel
from marlinq.kernels.sparse.config import SparseArguments, SparseConfig, choose
from marlinq.kernels.sparse.operand import SparseOperand

_DTYPES = (torch.float16, torch.bfloat16)


class PreparedSparse(NamedTuple):
    """One launch of the sparse kernel.

    Attributes:
        instantiation: the kernel.
        grid: blocks.
        threads: threads of a block.
        shared_bytes: bytes of dynamic shared memory of a block.
        arguments: the kernel's parameters; they hold addresses but keep no tensor alive.
    """

    instantiation: Instantiation
    grid: int
    threads: int
    shared_bytes: int
    arguments: SparseArguments


def prepare(
    config: SparseConfig,
    weight: SparseOperand,
    x: Tensor,
    bias: Tensor | None,
    out: Tensor,
    dependent: bool = False,
) -> PreparedSparse:
    """The launch of a product.

    Args:
        config: one of :func:`~marlinq.kernels.sparse.config.candidates`.
        weight: sparse weight with scales in the dtype of ``x``.
        x: float16 or bfloat16 [M, K], rows contiguous.
        bias: [N] in the dtype of ``x``, or None.
        out: [M, N] in the dtype of ``x``, rows contiguous; written.
        dependent: whether the launch overlaps with the previous kernel of the stream.
    """
    m, k = x.shape
    arguments = SparseArguments(
        *(each.data_ptr() for each in (x, weight.words, weight.masks, weight.scales)),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        m,
        weight.out_features,
        k,
        x.stride(0),
        out.stride(0),
        dependent,
    )
    granularity = weight.granularity
    return PreparedSparse(
        config.instantiation(granularity, x.dtype == torch.bfloat16),
        config.grid(m, weight.out_features),
        config.threads,
        config.shared_bytes(granularity),
        arguments,
    )


def launch(prepared: PreparedSparse, device_index: int) -> None:
    """Start a prepared launch on the current stream of its GPU.

    Raises:
        EnvironmentProblem: the kernel can't be compiled or loaded.
    """
    function = _loaded(prepared.instantiation, prepared.shared_bytes, device_index)
    with on_device(device_index):
        Launches(
            function, prepared.grid, prepared.threads, prepared.shared_bytes, prepared.arguments
        ).take().start()


def sparse_gemm(x: Tensor, weight: SparseOperand, bias: Tensor | None = None) -> Tensor:
    """x @ W.T + bias.

    Args:
        x: [M, K]; float16 or bfloat16 on a GPU, in the dtype of the weight's scales.
        weight: sparse weight on the device of ``x``.
        bias: [N] in the dtype of ``x``, or None.

    Returns:
        [M, N] in the dtype of ``x``; on a CPU computed in float32 and rounded once.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
        EnvironmentProblem: the kernel can't be compiled or loaded.
    """
    if x.dim() != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"x: expected [M, {weight.in_features}], found {list(x.shape)}")
    if not x.is_cuda:
        wide = x.float() @ weight.dequantize(torch.float32).t()
        return (wide if bias is None else wide + bias.float()).to(x.dtype)
    if x.dtype not in _DTYPES or weight.scales.dtype != x.dtype:
        raise ValueError(f"x: expected {weight.scales.dtype} as the scales have, found {x.dtype}")
    out = torch.empty(x.shape[0], weight.out_features, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    # The kernel reads rows in aligned pieces of 16 bytes.
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
    index = x.get_device()
    config = _chosen(len(x), weight.out_features, weight.in_features, index, weight.granularity)
    launch(prepare(config, weight, x, bias, out), index)
    return out


@lru_cache(maxsize=4096)
def _chosen(m: int, n: int, k: int, device_index: int, granularity: Granularity) -> SparseConfig:
    return choose(m, n, k, device_numbers(device_index), granularity)


@lru_cache(maxsize=256)
def _loaded(instantiation: Instantiation, shared_bytes: int, device_index: int) -> Function:
    architecture = device_numbers(device_index).architecture
    return load_kernel(instantiation, architecture, device_index, shared_bytes)
