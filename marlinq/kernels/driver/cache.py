"""Compiled kernels on disk: looked up by a digest of their inputs, checked by a digest of their bytes.

A cubin's file is named by the SHA-256 of its bytes. An entry is a small JSON file, named by the digest of
source, options and versions (:func:`marlinq.kernels.driver.compiler.compilation_key`), that names the cubin;
it is written last. A damaged entry or cubin is compiled again and replaced, with a warning.
:mod:`marlinq.core.kept` decides which folders are trusted, and reads and writes the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from marlinq.core.kept import kept_path, read_kept, write_kept
from marlinq.core.plain_values import load_json
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.compiler import compilation_key, compile_kernel, nvrtc_version

COMPILING = "compiling kernels"
"""Name of the task in progress reports."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Largest files that are read; the largest cubin is about 200 KB.
_MAX_ENTRY_BYTES, _MAX_CUBIN_BYTES = 1 << 16, 1 << 26


class KernelSpills(UserWarning):
    """This NVRTC spills a kernel's registers to local memory, so that it is slower than expected."""


class DamagedCache(UserWarning):
    """A kernel of the cache could not be used and was compiled again."""


@dataclass(frozen=True)
class _Entry:
    """Contents of an entry: digest of the cubin, registers a thread, bytes of spills and of stack."""

    sha256: str
    registers: int
    spill_bytes: int
    stack_bytes: int


def entry_path(instantiation: Instantiation, architecture: str) -> Path:
    """Path of a kernel's entry in the cache; the file exists once the kernel is compiled."""
    key = compilation_key(instantiation, architecture)
    return kept_path(f"{instantiation.function}-{architecture}-{key[:32]}.json")


def _cubin_path(entry: Path, sha256: str) -> Path:
    return entry.with_name(f"{sha256}.cubin")


def _read(path: Path) -> _Entry | None:
    """The entry; None where there is none.

    Raises:
        ValueError: it is damaged, or its cubin is.
        EnvironmentProblem: the folder can't be trusted.
    """
    try:
        text = read_kept(path.name, _MAX_ENTRY_BYTES)
    except OSError as error:
        raise ValueError(f"the entry can't be read ({error.strerror})") from None
    if text is None:
        return None
    try:
        entry = _Entry(**load_json(text))
    except (ValueError, TypeError):
        raise ValueError("the entry is not what marlinq writes") from None
    numbers = (entry.registers, entry.spill_bytes, entry.stack_bytes)
    if not _DIGEST.fullmatch(str(entry.sha256)) or not all(type(number) is int for number in numbers):
        raise ValueError("the entry is not what marlinq writes")
    try:
        cubin = read_kept(_cubin_path(path, entry.sha256).name, _MAX_CUBIN_BYTES)
    except OSError as error:
        raise ValueError(f"its cubin can't be read ({error.strerror})") from None
    if cubin is None:
        raise ValueError("its cubin can't be read (no such file)")
    if hashlib.sha256(cubin).hexdigest() != entry.sha256:
        raise ValueError("its cubin has other content than was written")
    return entry


def _describe(instantiation: Instantiation, architecture: str) -> str:
    values = " ".join(f"{name}={value}" for name, value in instantiation.parameters)
    return f"{instantiation.function} for {architecture} ({values})"


def _compile(path: Path, instantiation: Instantiation, architecture: str) -> _Entry:
    compiled = compile_kernel(instantiation, architecture)
    entry = _Entry(
        hashlib.sha256(compiled.cubin).hexdigest(),
        compiled.registers,
        compiled.spill_bytes,
        compiled.stack_bytes,
    )
    write_kept(_cubin_path(path, entry.sha256).name, compiled.cubin)
    write_kept(path.name, json.dumps(vars(entry)).encode())
    return entry


def cached_cubin(instantiation: Instantiation, architecture: str) -> Path:
    """The path of the cubin, compiled now if no process has done so before or the cache is damaged.

    Warns:
        DamagedCache: the cache was damaged; the kernel is compiled again and replaced.
        KernelSpills: the kernel spills registers with this NVRTC.

    Raises:
        EnvironmentProblem: as :func:`marlinq.kernels.driver.compiler.compile_kernel`, or the cache folder
            can't be trusted or written.
    """
    path = entry_path(instantiation, architecture)
    try:
        entry = _read(path)
    except ValueError as problem:
        return replaced_cubin(instantiation, architecture, str(problem))
    return _announced(path, entry or _compile(path, instantiation, architecture), instantiation, architecture)


def replaced_cubin(instantiation: Instantiation, architecture: str, problem: str) -> Path:
    """As :func:`cached_cubin`, but always compiled again; ``problem`` says why, in the warning."""
    path = entry_path(instantiation, architecture)
    warnings.warn(f"{path}: {problem}; the kernel is compiled again", DamagedCache, stacklevel=2)
    return _announced(path, _compile(path, instantiation, architecture), instantiation, architecture)


def _announced(path: Path, entry: _Entry, instantiation: Instantiation, architecture: str) -> Path:
    if entry.spill_bytes:
        warnings.warn(
            f"{_describe(instantiation, architecture)}: NVRTC {nvrtc_version()} spills {entry.spill_bytes} "
            "bytes of registers, so it is slower than expected; the versions in constraints.txt don't",
            KernelSpills,
            stacklevel=3,
        )
    return _cubin_path(path, entry.sha256)


def _is_missing(instantiation: Instantiation, architecture: str) -> bool:
    try:
        return _read(entry_path(instantiation, architecture)) is None
    except ValueError:
        return True


def compile_missing(
    architecture: str, wanted: Sequence[Instantiation], progress: ReportProgress = no_progress
) -> int:
    """Compile the kernels that the cache lacks or holds damaged, in one thread a core; returns their number.

    ``progress`` is called after each kernel.
    """
    missing = [instantiation for instantiation in wanted if _is_missing(instantiation, architecture)]
    if not missing:
        return 0
    progress(COMPILING, 0, len(missing))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = pool.map(lambda instantiation: cached_cubin(instantiation, architecture), missing)
        for done, _ in enumerate(compiled, 1):
            progress(COMPILING, done, len(missing))
    return len(missing)
