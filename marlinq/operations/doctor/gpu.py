"""Examines driver, devices, CuPy and NVRTC without torch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from marlinq.core.version import install_command
from marlinq.operations.doctor.diagnosis import Finding, State
from marlinq.operations.doctor.packages import installed_version

CUPY_BUILDS = {"cupy-cuda12x": 12, "cupy-cuda13x": 13}
"""CUDA major version that each CuPy wheel is built for."""

_LOWEST_CAPABILITY = (8, 0)
_ATTRIBUTE_MAJOR = 75
_ATTRIBUTE_MINOR = 76
_PROBE = 'extern "C" __global__ void probe(float* x) { x[0] = 1.0f; }'


@dataclass(frozen=True)
class DriverDevice:
    """One GPU: its name, compute capability and memory in bytes."""

    name: str
    capability: tuple[int, int]
    memory: int


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: the newest CUDA version (major, minor) that it runs, and its devices."""

    cuda: tuple[int, int]
    devices: tuple[DriverDevice, ...]


def find_driver() -> tuple[Driver | None, Finding]:
    """The driver, or None, and the finding about it; asks ``libcuda.so.1``, hence needs no Python package."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, Finding(
            "NVIDIA driver", State.ABSENT, "no libcuda.so.1: a machine without an NVIDIA GPU"
        )
    status = library.cuInit(0)
    if status != 0:
        return None, Finding(
            "NVIDIA driver",
            State.PROBLEM,
            f"libcuda.so.1 is there, but cuInit gives error {status}",
            "run nvidia-smi: the kernel module may be missing, older than the library, or the device hidden",
        )
    version, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    library.cuDeviceGetCount(ctypes.byref(count))
    cuda = (version.value // 1000, version.value % 1000 // 10)
    driver = Driver(cuda, tuple(_device(library, index) for index in range(count.value)))
    return driver, Finding("NVIDIA driver", State.OK, f"runs CUDA up to {cuda[0]}.{cuda[1]}")


def _device(library: ctypes.CDLL, index: int) -> DriverDevice:
    handle = ctypes.c_int()
    library.cuDeviceGet(ctypes.byref(handle), index)
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGetName(name, len(name), handle)
    major, minor, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    library.cuDeviceGetAttribute(ctypes.byref(major), _ATTRIBUTE_MAJOR, handle)
    library.cuDeviceGetAttribute(ctypes.byref(minor), _ATTRIBUTE_MINOR, handle)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
    return DriverDevice(name.value.decode(errors="replace"), (major.value, minor.value), memory.value)


def device_findings(driver: Driver) -> list[Finding]:
    """One finding for each GPU, or a single one when the driver shows no GPU."""
    if not driver.devices:
        return [
            Finding(
                "GPU",
                State.PROBLEM,
                "the driver shows no device",
                "check CUDA_VISIBLE_DEVICES and nvidia-smi",
            )
        ]
    findings = []
    for index, device in enumerate(driver.devices):
        major, minor = device.capability
        found = f"{device.name}, compute capability {major}.{minor}, {device.memory / 2**30:.0f} GiB"
        if device.capability < _LOWEST_CAPABILITY:
            fix = "the kernel needs 8.0 (Ampere) or newer; this device is used without it"
            findings.append(Finding(f"GPU {index}", State.PROBLEM, found, fix))
        else:
            findings.append(Finding(f"GPU {index}", State.OK, found))
    return findings


def cupy_finding(driver: Driver | None) -> Finding:
    """Whether exactly one CuPy build is installed and the driver can run it."""
    found = {name: version for name in (*CUPY_BUILDS, "cupy") if (version := installed_version(name))}
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    fitting = "cuda13" if driver is None or driver.cuda[0] >= 13 else "cuda12"
    if not found:
        state = State.ABSENT if driver is None else State.PROBLEM
        return Finding("CuPy", state, "not installed", install_command(fitting) if driver else "")
    if len(found) > 1:
        keep = {"cuda12": "cupy-cuda12x", "cuda13": "cupy-cuda13x"}[fitting]
        fix = f"pip uninstall {' '.join(found)}, then pip install {keep}"
        return Finding("CuPy", State.PROBLEM, f"{listed}: two builds shadow each other", fix)
    (name,) = found
    built_for = CUPY_BUILDS.get(name)
    if driver is not None and built_for is not None and built_for > driver.cuda[0]:
        problem = (
            f"{listed} needs a driver for CUDA {built_for}, found one for {driver.cuda[0]}.{driver.cuda[1]}"
        )
        fix = f"update the driver, or pip uninstall {name} and {install_command('cuda12')}"
        return Finding("CuPy", State.PROBLEM, problem, fix)
    return Finding("CuPy", State.OK, listed)


def bindings_finding(driver: Driver | None) -> Finding:
    """Whether cuda-bindings is installed and of the same CUDA major version as CuPy."""
    version = installed_version("cuda-bindings")
    if version is None:
        state = State.ABSENT if driver is None else State.PROBLEM
        extra = "cuda13" if driver is None or driver.cuda[0] >= 13 else "cuda12"
        return Finding("cuda-bindings", state, "not installed", install_command(extra) if driver else "")
    major = int(version.split(".")[0])
    builds = {build for name, build in CUPY_BUILDS.items() if installed_version(name)}
    if len(builds) == 1 and major not in builds:
        (build,) = builds
        fix = install_command(f"cuda{build}")
        return Finding("cuda-bindings", State.PROBLEM, f"{version} beside CuPy for CUDA {build}", fix)
    return Finding("cuda-bindings", State.OK, version)


def nvrtc_finding(driver: Driver | None) -> Finding:
    """Compile a trivial kernel for the first GPU, or for Ampere where there is none."""
    architecture = "sm_80"
    if driver is not None and driver.devices:
        major, minor = driver.devices[0].capability
        architecture = f"sm_{major}{minor}"
    missing = State.ABSENT if driver is None else State.PROBLEM
    try:
        from cupy_backends.cuda.libs import nvrtc

        version = ".".join(map(str, nvrtc.getVersion()))
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        return Finding(
            "NVRTC", missing, f"not usable: {reason}", "install the cuda12 or cuda13 extra of marlinq"
        )
    program = nvrtc.createProgram(_PROBE, "probe.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}",))
        size = len(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError as error:
        fix = "install a newer nvidia-cuda-nvrtc, within the CUDA version that the driver runs"
        return Finding("NVRTC", State.PROBLEM, f"{version} can't compile for {architecture}: {error}", fix)
    finally:
        nvrtc.destroyProgram(program)
    return Finding("NVRTC", State.OK, f"{version}, compiled a kernel of {size} bytes for {architecture}")
