"""Any kernel of any source, compiled through the cache and launched with explicit arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from marlinq.errors import EnvironmentProblem
from marlinq.kernels.compiler import cached_cubin
from marlinq.kernels.launch import device_numbers

POINTER = ctypes.c_void_p
INT32 = ctypes.c_int
INT64 = ctypes.c_longlong


class RawKernel:
    """One ``extern "C"`` kernel on one device.

    Args:
        source: a file of ``kernels/cuda``, or an absolute path.
        function: the kernel's name.
        device: the CUDA device, with its index.
        defines: preprocessor definitions.

    Raises:
        EnvironmentProblem: CuPy, cuda-bindings or NVRTC is missing, or the source does not compile.
    """

    def __init__(
        self, source: str, function: str, device: torch.device, defines: Mapping[str, object]
    ) -> None:
        try:
            import cupy
            from cuda.bindings import driver
        except ImportError as error:
            raise EnvironmentProblem(
                f"{error.name} is not installed; install marlinq[cuda12] or [cuda13], matching the driver"
            ) from None
        self._driver = driver
        self._index: int = device.index
        path = cached_cubin(source, device_numbers(self._index).architecture, defines)
        with torch.cuda.device(self._index), cupy.cuda.Device(self._index):
            # The function keeps the module loaded.
            self._function = cupy.RawModule(path=str(path)).get_function(function)
        self._handle = driver.CUfunction(int(self._function.kernel.ptr))

    def launch(
        self, grid: int, threads: int, arguments: Sequence[tuple[Any, type]], *, dependent: bool = False
    ) -> None:
        """Launch on the current stream; ``arguments`` are pairs (value, ctypes type).

        Args:
            grid: blocks.
            threads: threads of a block.
            arguments: the kernel's parameters in order.
            dependent: whether the kernel may start before the stream's previous one has ended
                (``griddepcontrol.wait`` in the kernel then waits for that one).

        Raises:
            RuntimeError: the driver refused the launch.
        """
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.hStream = driver.CUstream(torch.cuda.current_stream(self._index).cuda_stream)
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values, types = tuple(value for value, _ in arguments), tuple(kind for _, kind in arguments)
        with torch.cuda.device(self._index):
            (status,) = driver.cuLaunchKernelEx(config, self._handle, (values, types), 0)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuLaunchKernelEx failed with {status.name}")
