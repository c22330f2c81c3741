"""Activations in the channel order of a weight that was quantised in activation order."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from marlinq.kernels.compiler import cached_cubin
from marlinq.kernels.decision import demands
from marlinq.kernels.driver import Launches, load_function, on_device
from marlinq.kernels.launch import device_numbers

_THREADS = 128


class _Arguments(ctypes.Structure):
    """The parameters of ``cuda/gather.cu``."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("m", ctypes.c_int),
        ("k", ctypes.c_int),
        ("x_stride", ctypes.c_longlong),
    )


@lru_cache(maxsize=4096)
def _launches(device_index: int, m: int, k: int, x_stride: int, dependent: bool) -> Launches:
    architecture = device_numbers(device_index).architecture
    cubin = cached_cubin("gather.cu", architecture, {"THREADS": _THREADS})
    return Launches(
        load_function(cubin, "gather", device_index),
        -(-m * k // (8 * _THREADS)),
        _THREADS,
        0,
        _Arguments(m=m, k=k, x_stride=x_stride),
        dependent=dependent,
    )


def gather_channels(x: Tensor, order: Tensor) -> Tensor:
    """``x[:, order]`` on the current stream, as a kernel that a dependent launch may follow.

    Args:
        x: [M, any], 16-bit floats, unit stride along rows, M >= 1.
        order: int32 [K], contiguous, K a multiple of 8; negative entries give zeros. Entries are not checked.

    Returns:
        [M, K], contiguous.

    Raises:
        RuntimeError: the driver refused the launch.
    """
    m, k = x.shape[0], order.shape[0]
    out = torch.empty((m, k), dtype=x.dtype, device=x.device)
    launches = _launches(x.device.index, m, k, x.stride(0), demands().dependent)
    with on_device(x.device.index):
        launch = launches.take()
        arguments = launch.arguments
        arguments.x = x.data_ptr()
        arguments.order = order.data_ptr()
        arguments.out = out.data_ptr()
        launch.start()
        launches.give(launch)
    return out
