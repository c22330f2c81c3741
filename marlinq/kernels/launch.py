"""Launching a decided kernel on torch's current stream."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from marlinq.errors import EnvironmentProblem
from marlinq.kernels.compiler import cached_cubin, compile_missing
from marlinq.kernels.decision import Device, KernelDecision, Problem, decide

SOURCE = "w4a16_stream.cu"
_FUNCTION = "w4a16_stream"
# Six pointers, M, N, K, four bytes of padding, two strides, a flag: the layout of the kernel's parameters.
_ARGUMENTS = struct.Struct("=6Q3i4x2qi")
# CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION (cuda.h).
_BUFFER_POINTER, _BUFFER_SIZE, _PROGRAMMATIC = 1, 2, 6

_dependent: ContextVar[bool] = ContextVar("marlinq_dependent_launches", default=False)


@contextmanager
def dependent_launches() -> Iterator[None]:
    """Launch the kernels inside with programmatic dependent launch (compute capability 9.0 and later).

    A kernel may then start, and request its weights and scales, while the previous kernel of the stream still runs; it
    waits for that kernel before it touches activations or the output. So no kernel inside may write the weights of a
    later one.
    """
    token = _dependent.set(True)
    try:
        yield
    finally:
        _dependent.reset(token)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


_PROGRAMMATIC_ATTRIBUTE = _Attribute(_PROGRAMMATIC, 0, 1)


@dataclass(frozen=True)
class _Function:
    """A loaded kernel; ``owner`` keeps its module alive."""

    owner: Any
    handle: ctypes.c_void_p


@dataclass(frozen=True)
class _Prepared:
    function: _Function
    grid: int
    threads: int
    shared_bytes: int


@lru_cache(maxsize=16)
def device_numbers(index: int) -> Device:
    """The numbers of CUDA device ``index`` that decisions rest on.

    Raises:
        EnvironmentProblem: the GPU is older than compute capability 8.0.
    """
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


def defines_of(problem: Problem, decision: KernelDecision) -> dict[str, object]:
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


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EnvironmentProblem(
            f"the CUDA driver can't be loaded ({error}); install the NVIDIA driver"
        ) from None


@lru_cache(maxsize=None)
def _function(device_index: int, defines: tuple[tuple[str, object], ...], shared_bytes: int) -> _Function:
    import cupy

    path = cached_cubin(SOURCE, device_numbers(device_index).architecture, dict(defines))
    with torch.cuda.device(device_index), cupy.cuda.Device(device_index):
        function = cupy.RawModule(path=str(path)).get_function(_FUNCTION)
        function.max_dynamic_shared_size_bytes = shared_bytes
        return _Function(function, ctypes.c_void_p(int(function.kernel.ptr)))


@lru_cache(maxsize=8192)
def _prepare(problem: Problem, device_index: int) -> _Prepared:
    decision = decide(problem, device_numbers(device_index))
    config = decision.config
    if config is None:
        raise ValueError(f"no kernel was decided for {problem}")
    shared = config.shared_bytes(max(problem.group_size, 0), problem.zeros)
    function = _function(device_index, tuple(sorted(defines_of(problem, decision).items())), shared)
    return _Prepared(function, decision.grid, config.threads, shared)


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

    ``x`` [M, K] and ``out`` [M, N] have unit stride along their rows; rows of ``x`` are 16-byte aligned.

    Raises:
        RuntimeError: the driver refused the launch.
    """
    index = x.device.index
    m, k = x.shape
    n = out.shape[1]
    prepared = _prepare(Problem(m, n, k, group_size, zeros is not None, x.dtype == torch.bfloat16), index)
    dependent = _dependent.get()
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
        dependent,
    )
    size = ctypes.c_size_t(len(values))
    extra = (ctypes.c_void_p * 5)(
        _BUFFER_POINTER, ctypes.cast(values, ctypes.c_void_p), _BUFFER_SIZE, ctypes.addressof(size), None
    )
    config = _Config(
        (prepared.grid, 1, 1),
        (prepared.threads, 1, 1),
        prepared.shared_bytes,
        torch.cuda.current_stream(index).cuda_stream,
        ctypes.pointer(_PROGRAMMATIC_ATTRIBUTE) if dependent else None,
        int(dependent),
    )
    # The default stream belongs to whatever device is current.
    with nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index):
        status = _driver().cuLaunchKernelEx(ctypes.byref(config), prepared.function.handle, None, extra)
    if status != 0:
        raise RuntimeError(f"w4a16_gemm: cuLaunchKernelEx failed with CUDA error {status} ({prepared})")


def precompile(problems: Iterable[Problem], device_index: int = 0) -> int:
    """Compile every variant that ``problems`` need on a device and the cache lacks, in parallel.

    Returns:
        How many variants were compiled.

    Raises:
        EnvironmentProblem: a variant does not compile, or the cache can't be written.
    """
    device = device_numbers(device_index)
    variants = {tuple(sorted(defines_of(problem, decide(problem, device)).items())) for problem in problems}
    return compile_missing(SOURCE, device.architecture, [dict(variant) for variant in sorted(variants)])
