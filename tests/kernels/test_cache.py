"""The kernel cache: shared by users and processes, and whole again after any damage."""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from marlinq.core.errors import EnvironmentProblem
from marlinq.kernels.jit import cache
from marlinq.kernels.jit.cache import DamagedCache, KernelSpills, cached_cubin, compile_missing
from marlinq.kernels.jit.compiler import CompiledKernel
from marlinq.kernels.launch import loading
from marlinq.kernels.launch.driver import Function, RefusedCubin

SOURCE, ARCHITECTURE = "gather.cu", "sm_90a"
DEFINES = {"THREADS": 128}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """What was compiled; every cubin is another, as if the compiler's output were not deterministic."""
    found: list[dict[str, object]] = []

    def compile_kernel(source: str, architecture: str, defines: dict[str, object]) -> CompiledKernel:
        found.append(defines)
        return CompiledKernel(b"\x7fELF %d" % len(found), 40, 16 * bool(defines.get("SPILLS")), 0, "")

    monkeypatch.setattr(cache, "compile_kernel", compile_kernel)
    return found


def only(folder: Path, pattern: str) -> Path:
    [path] = folder.glob(pattern)
    return path


def test_a_kernel_is_compiled_once_and_found_again(folder: Path, compiled: list[object]) -> None:
    path = cached_cubin(SOURCE, ARCHITECTURE, DEFINES)
    assert path.read_bytes() == b"\x7fELF 1"
    assert cached_cubin(SOURCE, ARCHITECTURE, dict(DEFINES)) == path
    assert cached_cubin(SOURCE, "sm_80", DEFINES) != path
    assert len(compiled) == 2
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_have_the_permissions_of_the_umask(
    folder: Path, compiled: list[object], umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        cached_cubin(SOURCE, ARCHITECTURE, DEFINES)
    finally:
        os.umask(before)
    found = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert found == {".cubin": mode, ".json": mode}


def _cut(folder: Path) -> None:
    path = only(folder, "*.cubin")
    path.write_bytes(path.read_bytes()[:-1])


def _flip(folder: Path) -> None:
    path = only(folder, "*.cubin")
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def _point_elsewhere(folder: Path) -> None:
    path = only(folder, "*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "sha256": "../../other"}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "other content"),
        (_flip, "other content"),
        (lambda folder: only(folder, "*.cubin").unlink(), "can't be read"),
        (lambda folder: only(folder, "*.json").write_text(""), "not what marlinq writes"),
        (lambda folder: only(folder, "*.json").write_text("[1]"), "not what marlinq writes"),
        (lambda folder: only(folder, "*.json").write_text('{"sha256": 3}'), "not what marlinq writes"),
        (lambda folder: only(folder, "*.json").write_bytes(b"\xff"), "not what marlinq writes"),
        (_point_elsewhere, "not what marlinq writes"),
    ],
)
@pytest.mark.parametrize("in_advance", [False, True])
def test_a_damaged_entry_heals_and_says_so(
    folder: Path, compiled: list[object], damage: Callable[[Path], object], message: str, in_advance: bool
) -> None:
    cached_cubin(SOURCE, ARCHITECTURE, DEFINES)
    damage(folder)
    heal = (
        partial(compile_missing, variants=[DEFINES]) if in_advance else partial(cached_cubin, defines=DEFINES)
    )
    with pytest.warns(DamagedCache, match=message):
        heal(SOURCE, ARCHITECTURE)
    assert len(compiled) == 2
    assert cached_cubin(SOURCE, ARCHITECTURE, DEFINES).read_bytes() == b"\x7fELF 2"
    assert compile_missing(SOURCE, ARCHITECTURE, [DEFINES]) == 0


def test_a_cubin_that_the_driver_refuses_is_replaced(
    folder: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {b"\x7fELF 1"}

    def load_function(cubin: Path, name: str, device_index: int, shared_bytes: int) -> Function:
        if cubin.read_bytes() in refused:
            raise RefusedCubin(f"the driver refuses {cubin.name}")
        return Function((cubin, name, shared_bytes), None, device_index, None)  # type: ignore[arg-type]

    monkeypatch.setattr(loading, "load_function", load_function)
    with pytest.warns(DamagedCache, match=r"gather-sm_90a-.*refuses .*compiled again"):
        found = loading.load_kernel(SOURCE, "gather", ARCHITECTURE, DEFINES, 0, 64)
    assert found.owner[0].read_bytes() == b"\x7fELF 2"
    assert loading.load_kernel(SOURCE, "gather", ARCHITECTURE, DEFINES, 0, 64) == found
    assert len(compiled) == 2
    # What was just compiled is not compiled a third time.
    refused.update({b"\x7fELF 2", b"\x7fELF 3"})
    with pytest.warns(DamagedCache), pytest.raises(EnvironmentProblem, match="refuses"):
        loading.load_kernel(SOURCE, "gather", ARCHITECTURE, DEFINES, 0, 64)
    assert len(compiled) == 3


def test_a_folder_that_cannot_be_written_is_an_error(
    folder: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file")
    with pytest.raises(EnvironmentProblem, match="MARLINQ_CACHE"):
        cached_cubin(SOURCE, ARCHITECTURE, DEFINES)
    folder.unlink()

    def full(descriptor: int, mode: str) -> object:
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "fdopen", full)
    with pytest.raises(EnvironmentProblem, match="No space left"):
        cached_cubin(SOURCE, ARCHITECTURE, DEFINES)
    assert list(folder.iterdir()) == []


def test_spills_are_said_whenever_a_kernel_is_fetched(folder: Path, compiled: list[object]) -> None:
    for _ in range(2):
        with pytest.warns(KernelSpills, match=r"gather.cu for sm_90a \(SPILLS=1 THREADS=128\).* 16 bytes"):
            cached_cubin(SOURCE, ARCHITECTURE, {**DEFINES, "SPILLS": 1})
    assert len(compiled) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached_cubin(SOURCE, ARCHITECTURE, DEFINES)
