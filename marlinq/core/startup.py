"""Opening the GPU while large libraries are still being imported."""

from __future__ import annotations

import ctypes
import threading

from marlinq.core.devices import check_device_name


def open_gpu_early(device: str) -> threading.Thread | None:
    """Let the driver open the GPU that ``device`` names, in a thread, while torch is still imported.

    The driver's context of a device is one for the whole process, so torch finds it open. Where there is no
    driver or no such GPU nothing happens, and whoever needs it says so.

    Returns:
        The thread, or None where no GPU is meant.
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
    # ctypes gives up the interpreter for each call. Any error ends this; torch will meet it again.
    _ = (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(handle), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    )
