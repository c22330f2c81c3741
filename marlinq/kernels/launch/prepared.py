"""A launch described by kernel, grid and arguments, before the kernel is compiled or loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.driver.cuda_driver import Function, Launch, Launches
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel

ELEMENTS = {torch.float16: "Half", torch.bfloat16: "Bfloat16"}
"""CUDA types of activations, by dtype."""

VECTOR = 8
"""Elements of 16 bits that a thread loads at once: rows and their strides are multiples of this."""


class Prepared(NamedTuple):
    """One launch of a kernel that may not be compiled yet.

    Attributes:
        instantiation: the kernel.
        grid: blocks.
        threads: threads of a block.
        arguments: the kernel's parameters, which hold addresses of tensors but keep none alive.
        shared_bytes: dynamic shared memory of a block.
    """

    instantiation: Instantiation
    grid: int
    threads: int
    arguments: ctypes.Structure
    shared_bytes: int = 0


@lru_cache(maxsize=1024)
def _function(instantiation: Instantiation, device_index: int, shared_bytes: int) -> Function:
    architecture = device_numbers(device_index).architecture
    return load_kernel(instantiation, architecture, device_index, shared_bytes)


def bind(prepared: Prepared, device_index: int, *, dependent: bool) -> Launch:
    """Compile or load the kernel and make a launch that can be started any number of times.

    Args:
        prepared: launch to make.
        device_index: index of the GPU.
        dependent: whether the kernel may start before the stream's previous one has ended, and waits for that
            one itself; ignored on GPUs before compute capability 9.0.

    Raises:
        EnvironmentProblem: as :func:`marlinq.kernels.driver.module.load_kernel`.
    """
    launches = Launches(
        _function(prepared.instantiation, device_index, prepared.shared_bytes),
        prepared.grid,
        prepared.threads,
        prepared.shared_bytes,
        prepared.arguments,
        dependent=dependent and device_numbers(device_index).has_clusters,
    )
    return launches.take()


def precompile_prepared(
    wanted: Iterable[Prepared], device_index: int, progress: ReportProgress = no_progress
) -> int:
    """Compile in parallel the kernels that the cache lacks; returns their number.

    Raises:
        EnvironmentProblem: a kernel does not compile, or the cache can't be written.
    """
    kernels = dict.fromkeys(prepared.instantiation for prepared in wanted)
    return compile_missing(device_numbers(device_index).architecture, list(kernels), progress)


def address(tensor: Tensor | None) -> int:
    """Address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def check_rows(**tensors: Tensor | None) -> None:
    """Check that kernels can load the rows of 16-bit tensors in vectors of 16 bytes.

    Raises:
        ValueError: a tensor has another dtype, is not aligned, or has strides that are no multiple of 8.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        strided = tensor.stride()
        if tensor.dtype not in ELEMENTS or tensor.shape[-1] % VECTOR or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name}: expected 16-bit floats in rows of a multiple of {VECTOR}, aligned to 16 bytes, "
                f"found {tensor.dtype} {list(tensor.shape)} at {tensor.data_ptr()}"
            )
        if strided[-1] != 1 or any(step % VECTOR for step in strided[:-1]):
            raise ValueError(f"{name}: expected rows that lie together, found strides {list(strided)}")
