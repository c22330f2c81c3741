"""Opening the GPU while large libraries are still being imported."""

from __future__ import annotations

import ctypes
import threading

from marlinq.core.devices import check_device_name


def open_gpu_early(device: str) -> threading.Thread | None:
    """Create the CUDA context of the GPU that ``device`` names, in a thread, while torch is being imported.

    A process has one primary context per device, so torch then finds it created. Without a driver or such a
    GPU nothing happens; the code that needs the GPU reports it.

    Returns:
        The thread, or None where ``device`` names no GPU.
    """
    if check_device_name(device) == "cpu":
        return None
    index = int(device.partition(":")[2] or 0)
    thread = threading.Thread(target=_open_gpu, args=(index,), name="marlinq-open-gpu")
    thread.start()
    return thread


def _open_gpu(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    # ctypes releases Python's global lock during each call. Errors are ignored; torch will meet them again.
    _ = (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(handle), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    )
