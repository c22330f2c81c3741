"""Activations in the channel order of a weight that was quantised in activation order."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from marlinq.kernels.compiler import cached_cubin
from marlinq.kernels.decision import demands
from marlinq.kernels.driver import Function, launch, load_function, on_device
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


@lru_cache(maxsize=64)
def _function(device_index: int) -> Function:
    architecture = device_numbers(device_index).architecture
    return load_function(
        cached_cubin("gather.cu", architecture, {"THREADS": _THREADS}), "gather", device_index
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
    function = _function(x.device.index)
    arguments = _Arguments(x.data_ptr(), order.data_ptr(), out.data_ptr(), m, k, x.stride(0))
    with on_device(function):
        launch(function, -(-m * k // (8 * _THREADS)), _THREADS, 0, arguments, dependent=demands().dependent)
    return out
