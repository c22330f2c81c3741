"""Run-time compilation: CUDA C++ to a cubin through NVRTC."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.version import CUDA_PACKAGES
from marlinq.kernels.contract.instantiation import CUDA_SOURCES, Instantiation

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
"""Architectures that the test suite compiles all kernels for."""


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what ptxas reports of it.

    Attributes:
        cubin: the compiled kernel.
        registers: registers a thread.
        spill_bytes: bytes of registers a thread stores to and loads from local memory.
        stack_bytes: bytes of a thread's stack, which holds arrays that can't be kept in registers.
        log: text of NVRTC and ptxas.
    """

    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    log: str


@lru_cache(maxsize=1)
def _headers() -> dict[str, bytes]:
    """Source files by the names in ``#include``."""
    return {
        path.relative_to(CUDA_SOURCES).as_posix(): path.read_bytes()
        for path in sorted(CUDA_SOURCES.rglob("*.cuh"))
    }


def _sources(instantiation: Instantiation) -> dict[str, bytes]:
    """The headers that an instantiation's text may include, with its own, which may lie in another folder."""
    headers = _headers()
    if instantiation.header not in headers:
        headers = {**headers, instantiation.header: Path(instantiation.header).read_bytes()}
    return headers


def _options(architecture: str) -> tuple[str, ...]:
    # Without -default-device NVRTC 13.0 compiles generic lambdas as host functions.
    return (f"-arch={architecture}", "-std=c++17", "-default-device", "--ptxas-options=-v", "-lineinfo")


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise EnvironmentProblem(f"CuPy is not installed ({error}); {CUDA_PACKAGES}") from None
    return nvrtc


@contextmanager
def _compiled(text: str, name: str, architecture: str, headers: Mapping[str, bytes]) -> Iterator[Any]:
    """NVRTC's program after compilation of ``text``, which messages call ``name``."""
    nvrtc = _nvrtc()
    included = [header.encode() for header in headers]
    program = nvrtc.createProgram(text, f"{name}.cu", list(headers.values()), included)
    try:
        try:
            nvrtc.compileProgram(program, list(_options(architecture)))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            first = next((line for line in log.splitlines() if "error" in line), str(error))
            raise EnvironmentProblem(
                f"{name} does not compile for {architecture} with NVRTC {nvrtc_version()}: {first}"
            ) from None
        yield program
    finally:
        nvrtc.destroyProgram(program)


def compile_kernel(instantiation: Instantiation, architecture: str) -> CompiledKernel:
    """Compile a kernel for ``architecture`` without touching the cache; needs NVRTC but no GPU.

    Raises:
        EnvironmentProblem: CuPy or NVRTC is missing, or NVRTC rejects the source (its first error is quoted).
    """
    return compile_text(instantiation.text(), instantiation.function, architecture, _sources(instantiation))


def compile_text(
    text: str, name: str, architecture: str, headers: Mapping[str, bytes] | None = None
) -> CompiledKernel:
    """As :func:`compile_kernel`, for a whole translation unit.

    Args:
        text: CUDA C++ (:func:`marlinq.kernels.contract.instantiation.unit`).
        name: name in messages.
        architecture: for example ``sm_90a``.
        headers: texts that may be included, by name; the kernels' sources if None.

    Raises:
        EnvironmentProblem: as :func:`compile_kernel`.
    """
    with _compiled(text, name, architecture, _headers() if headers is None else headers) as program:
        log = _nvrtc().getProgramLog(program)
        cubin = _nvrtc().getCUBIN(program)
    registers = max((int(number) for number in re.findall(r"Used (\d+) registers", log)), default=0)
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    stack = max((int(number) for number in re.findall(r"(\d+) bytes stack frame", log)), default=0)
    return CompiledKernel(cubin, registers, spills, stack, log)


def compile_to_ptx(instantiation: Instantiation, architecture: str) -> bytes:
    """As :func:`compile_kernel`, but PTX for a virtual architecture such as ``compute_80``.

    The driver of any later GPU assembles and runs it, so kernels for an older GPU can be tested on a newer
    one.

    Raises:
        EnvironmentProblem: as :func:`compile_kernel`.
    """
    text, name = instantiation.text(), instantiation.function
    with _compiled(text, name, architecture, _sources(instantiation)) as program:
        return bytes(_nvrtc().getPTX(program))


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """The version of the NVRTC library that CuPy loads, for example ``13.0``."""
    major, minor = _nvrtc().getVersion()
    return f"{major}.{minor}"


def compilation_key(instantiation: Instantiation, architecture: str) -> str:
    """SHA-256 of all that a cubin depends on: sources, text, options, architecture, NVRTC version."""
    digest = hashlib.sha256(nvrtc_version().encode())
    options = [option.encode() for option in _options(architecture)]
    sources = _sources(instantiation)
    names = [name.encode() for name in sources]
    for data in (*names, *sources.values(), instantiation.text().encode(), *options):
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
