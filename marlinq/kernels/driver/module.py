"""Load a kernel onto a device: compiled or from the cache, compiled again if the driver rejects the cubin."""

from __future__ import annotations

from marlinq.core.errors import EnvironmentProblem
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cache import cached_cubin, replaced_cubin
from marlinq.kernels.driver.compiler import nvrtc_version
from marlinq.kernels.driver.cuda_driver import Function, RefusedCubin, load_function


def load_kernel(
    instantiation: Instantiation, architecture: str, device_index: int, shared_bytes: int = 0
) -> Function:
    """Compile or find a kernel and load it on a device.

    A cubin that the driver refuses is compiled again and replaced, with a warning.

    Args:
        instantiation: the kernel.
        architecture: architecture of the device, for example ``sm_90a``.
        device_index: index of the GPU.
        shared_bytes: dynamic shared memory that a block may have.

    Raises:
        EnvironmentProblem: CuPy or NVRTC is missing, the source does not compile, the cache can't be written,
            or the driver refuses what was just compiled.
    """
    cubin = cached_cubin(instantiation, architecture)
    try:
        return load_function(cubin, instantiation.function, device_index, shared_bytes)
    except RefusedCubin as problem:
        cubin = replaced_cubin(instantiation, architecture, str(problem))
    try:
        return load_function(cubin, instantiation.function, device_index, shared_bytes)
    except RefusedCubin as problem:
        raise EnvironmentProblem(
            f"{problem}, which NVRTC {nvrtc_version()} has just compiled; update the NVIDIA driver"
        ) from None
