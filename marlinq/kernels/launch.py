"""Launching a decided kernel on torch's current stream."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from marlinq.errors import EnvironmentProblem
from marlinq.kernels.compiler import cached_cubin
from marlinq.kernels.decision import Device, KernelDecision, Problem, decide

_SOURCE = "w4a16_stream.cu"
# Six pointers, M, N, K, four bytes of padding, two strides, a flag: the layout of the kernel's parameters.
_ARGUMENTS = struct.Struct("=6Q3i4x2qi")
_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE (cuda.h)


@lru_cache(maxsize=16)
def device_numbers(index: int) -> Device:
    """The numbers of CUDA device ``index`` that decisions rest on."""
    properties = torch.cuda.get_device_properties(index)
    major, minor = properties.major, properties.minor
    if major < 8:
        raise EnvironmentProblem(
            f"GPU {index} has compute capability {major}.{minor}; the kernels need 8.0 or later"
        )
    suffix = "a" if major >= 9 else ""
    return Device(
        architecture=f"sm_{major}{minor}{suffix}",
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
    )


@dataclass(frozen=True)
class _Loaded:
    function: Any  # keeps the module alive
    handle: ctypes.c_void_p
    grid: int
    threads: int
    shared_bytes: int


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EnvironmentProblem(f"the CUDA driver can't be loaded ({error}); install the NVIDIA driver") from None


def defines_of(decision: KernelDecision, problem: Problem) -> dict[str, object]:
    """The preprocessor definitions that select the decided variant."""
    config = decision.config
    if config is None:
        raise ValueError("the reference kernel is not compiled")
    return {
        "ELEMENT": "Bfloat16" if problem.bfloat16 else "Half",
        "WARPS_N": config.warps_n,
        "WARPS_K": config.warps_k,
        "BLOCKS_M": config.blocks_m,
        "ROWS": config.rows,
        "GROUP": max(problem.group_size, 0),
        "ZEROS": int(problem.zeros),
        "SCALE_SUMS": int(config.scale_sums),
        "CLUSTER": config.cluster,
        "STAGES": config.stages,
        "MIN_BLOCKS": config.min_blocks,
    }


@lru_cache(maxsize=4096)
def _load(problem: Problem, device_index: int) -> _Loaded:
    device = device_numbers(device_index)
    decision = decide(problem, device)
    config = decision.config
    assert config is not None  # noqa: S101 - decide() never returns the reference for a GPU
    import cupy

    path = cached_cubin(_SOURCE, device.architecture, defines_of(decision, problem))
    with torch.cuda.device(device_index), cupy.cuda.Device(device_index):
        function = cupy.RawModule(path=str(path)).get_function("w4a16_stream")
        shared = config.shared_bytes(max(problem.group_size, 0), problem.zeros)
        function.max_dynamic_shared_size_bytes = shared
        handle = ctypes.c_void_p(int(function.kernel.ptr))
    return _Loaded(function, handle, decision.grid, config.threads, shared)


def launch_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    group_size: int,
    out: Tensor,
) -> None:
    """Run ``out = x @ W + bias`` on the device and current stream of ``x``.

    ``x`` [M, K] and ``out`` [M, N] have unit stride along their rows and 16-byte aligned rows.
    """
    index = x.device.index
    m, k = x.shape
    n = out.shape[1]
    problem = Problem(m, n, k, group_size, zeros is not None, x.dtype == torch.bfloat16)
    loaded = _load(problem, index)
    values = _ARGUMENTS.pack(
        x.data_ptr(),
        words.data_ptr(),
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        m,
        n,
        k,
        x.stride(0),
        out.stride(0),
        0,
    )
    size = ctypes.c_size_t(len(values))
    extra = (ctypes.c_void_p * 5)(
        _BUFFER_POINTER,
        ctypes.cast(values, ctypes.c_void_p),
        _BUFFER_SIZE,
        ctypes.addressof(size),
        None,
    )
    stream = ctypes.c_void_p(torch.cuda.current_stream(index).cuda_stream)
    with torch.cuda.device(index):
        status = _driver().cuLaunchKernel(
            loaded.handle, loaded.grid, 1, 1, loaded.threads, 1, 1, loaded.shared_bytes, stream, None, extra
        )
    if status != 0:
        raise RuntimeError(f"w4a16_gemm: cuLaunchKernel failed with CUDA error {status} for {problem}")
