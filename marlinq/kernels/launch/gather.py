"""Gather the columns of activations in the order of the weight's rows (activation order)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cuda_driver import Function, Launches, empty_strided, on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.driver.module import load_kernel
from marlinq.kernels.launch.call import Call, overlaps

_THREADS = 128
INSTANTIATION = Instantiation("kernels/gather.cuh", "gather", (("THREADS", _THREADS),))
"""The gathering kernel."""


class _Arguments(ctypes.Structure):
    """The parameters of ``cuda/kernels/gather.cuh``."""

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
    return load_kernel(INSTANTIATION, architecture, device_index)


@lru_cache(maxsize=4096)
def _launches(device_index: int, m: int, k: int, x_stride: int, dependent: bool) -> Launches:
    return Launches(
        _function(device_index),
        -(-m * k // (8 * _THREADS)),
        _THREADS,
        0,
        _Arguments(m=m, k=k, x_stride=x_stride),
        dependent=dependent,
    )


def gathering(x: Tensor, order: Tensor) -> Launches:
    """The launches that gather activations with the shape and strides of ``x`` on its device."""
    index = x.get_device()
    return _launches(index, x.shape[0], order.shape[0], x.stride(0), overlaps(index))


def _start(launches: Launches, x: int, order: int, out: int) -> None:
    launch = launches.take()
    arguments = launch.arguments
    arguments.x = x
    arguments.order = order
    arguments.out = out
    launch.start()
    launches.give(launch)


@dataclass(frozen=True, slots=True)
class Gathered:
    """A prepared product whose activations are gathered first.

    Attributes:
        launches: launches of the gathering kernel (:func:`gathering`).
        order: address of the channel order, int32 [K].
        rows: M.
        columns: K.
        dtype: dtype of the activations.
        call: the product, prepared to be launched behind the gathering kernel.
    """

    launches: Launches
    order: int
    rows: int
    columns: int
    dtype: torch.dtype
    call: Call

    def start(self, x: int, out: int) -> None:
        """As :meth:`marlinq.kernels.launch.call.Call.start`; columns of ``x`` are not yet gathered."""
        taken = empty_strided((self.rows, self.columns), (self.columns, 1), self.dtype)
        address = taken.data_ptr()
        _start(self.launches, x, self.order, address)
        self.call.start(address, out)


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
    with on_device(x.device.index):
        _start(gathering(x, order), x.data_ptr(), order.data_ptr(), out.data_ptr())
    return out
