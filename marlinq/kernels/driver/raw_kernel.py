"""A kernel from any source file, compiled through the cache and launched with explicit arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cuda_driver import Launches, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel

POINTER = ctypes.c_void_p
INT32 = ctypes.c_int
INT64 = ctypes.c_longlong


class RawKernel:
    """One ``extern "C"`` kernel on one device.

    Args:
        instantiation: the kernel; its header may lie outside of ``kernels/cuda``.
        device: the CUDA device, with its index.

    Raises:
        EnvironmentProblem: CuPy or NVRTC is missing, or the source does not compile.
    """

    def __init__(self, instantiation: Instantiation, device: torch.device) -> None:
        architecture = device_numbers(device.index).architecture
        self._function = load_kernel(instantiation, architecture, device.index)

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
        layout = _layout(tuple(kind for _, kind in arguments))
        packed = layout(*(value for value, _ in arguments))
        launches = Launches(self._function, grid, threads, 0, packed, dependent=dependent)
        with on_device(self._function.device_index):
            launches.take().start()


@lru_cache(maxsize=64)
def _layout(kinds: tuple[type, ...]) -> type[ctypes.Structure]:
    fields = [(f"p{index}", kind) for index, kind in enumerate(kinds)]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})
