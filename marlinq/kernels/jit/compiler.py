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

_SOURCES = Path(__file__).parent.parent / "cuda"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
"""Every architecture the kernels are compiled for in the test suite."""


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin and what the assembler said of it: registers a thread, bytes spilled to local memory, and bytes
    of a thread's stack, where arrays lie that can't be kept in registers."""

    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    log: str


@lru_cache(maxsize=1)
def _headers() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(_SOURCES.glob("*.cuh"))}


def _options(architecture: str, defines: Mapping[str, object]) -> tuple[str, ...]:
    macros = tuple(f"-D{name}={value}" for name, value in sorted(defines.items()))
    # NVRTC 13.0 takes generic lambdas for host functions unless told otherwise.
    common = ("-std=c++17", "-default-device", "--ptxas-options=-v", "-lineinfo")
    return (f"-arch={architecture}", *common, *macros)


def _nvrtc() -> Any:
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise EnvironmentProblem(
            f"CuPy is not installed ({error}); install marlinq[cuda12] or [cuda13], matching the driver"
        ) from None
    return nvrtc


@contextmanager
def _compiled(source: str, architecture: str, defines: Mapping[str, object]) -> Iterator[Any]:
    """NVRTC's program after compilation."""
    nvrtc = _nvrtc()
    headers = _headers()
    text = (_SOURCES / source).read_text(encoding="utf-8")
    program = nvrtc.createProgram(text, source, list(headers.values()), [name.encode() for name in headers])
    try:
        try:
            nvrtc.compileProgram(program, list(_options(architecture, defines)))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            first = next((line for line in log.splitlines() if "error" in line), str(error))
            raise EnvironmentProblem(
                f"{source} does not compile for {architecture} with NVRTC {nvrtc_version()}: {first}"
            ) from None
        yield program
    finally:
        nvrtc.destroyProgram(program)


def compile_kernel(source: str, architecture: str, defines: Mapping[str, object]) -> CompiledKernel:
    """Compile ``cuda/<source>`` for ``architecture`` without touching the cache; needs NVRTC but no GPU.

    Raises:
        EnvironmentProblem: CuPy or NVRTC is missing, or NVRTC rejects the source (its first error is quoted).
    """
    with _compiled(source, architecture, defines) as program:
        log = _nvrtc().getProgramLog(program)
        cubin = _nvrtc().getCUBIN(program)
    registers = max((int(found) for found in re.findall(r"Used (\d+) registers", log)), default=0)
    spills = sum(int(found) for found in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))
    stack = max((int(found) for found in re.findall(r"(\d+) bytes stack frame", log)), default=0)
    return CompiledKernel(cubin, registers, spills, stack, log)


def compile_to_ptx(source: str, architecture: str, defines: Mapping[str, object]) -> bytes:
    """As :func:`compile_kernel`, but PTX for a virtual architecture such as ``compute_80``.

    Any later GPU runs it after its driver has assembled it, so what an older GPU executes can be tested on a
    newer one.

    Raises:
        EnvironmentProblem: as :func:`compile_kernel`.
    """
    with _compiled(source, architecture, defines) as program:
        return bytes(_nvrtc().getPTX(program))


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """The version of the NVRTC library that CuPy loads, for example ``13.0``."""
    major, minor = _nvrtc().getVersion()
    return f"{major}.{minor}"


def compilation_key(source: str, architecture: str, defines: Mapping[str, object]) -> str:
    """A digest of everything that decides the result: sources, options, architecture, NVRTC version."""
    digest = hashlib.sha256(nvrtc_version().encode())
    options = [option.encode() for option in _options(architecture, defines)]
    for data in (*_headers().values(), (_SOURCES / source).read_bytes(), *options):
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
