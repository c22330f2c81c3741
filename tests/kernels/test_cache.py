"""The kernel cache: shared by users and processes, and whole again after any damage."""

from __future__ import annotations

import json
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from marlinq.core import kept
from marlinq.core.errors import EnvironmentProblem
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver import cache, module
from marlinq.kernels.driver.cache import DamagedCache, KernelSpills, cached_cubin, compile_missing
from marlinq.kernels.driver.compiler import CompiledKernel
from marlinq.kernels.driver.cuda_driver import Function, RefusedCubin

GATHER, ARCHITECTURE = Instantiation("kernels/gather.cuh", "gather", (("THREADS", 128),)), "sm_90a"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Instantiation]]:
    """Compiled kernels; every cubin is another, as if the compiler's output were not deterministic."""
    found: list[Instantiation] = []

    def compile_kernel(instantiation: Instantiation, architecture: str) -> CompiledKernel:
        found.append(instantiation)
        spilled = 16 * ("SPILLS" in dict(instantiation.parameters))
        return CompiledKernel(b"\x7fELF %d" % len(found), 40, spilled, 0, "")

    monkeypatch.setattr(cache, "compile_kernel", compile_kernel)
    return found


def only(folder: Path, pattern: str) -> Path:
    [path] = folder.glob(pattern)
    return path


def test_a_kernel_is_compiled_once_and_found_again(folder: Path, compiled: list[object]) -> None:
    path = cached_cubin(GATHER, ARCHITECTURE)
    assert path.read_bytes() == b"\x7fELF 1"
    assert cached_cubin(GATHER, ARCHITECTURE) == path
    assert cached_cubin(GATHER, "sm_80") != path
    assert len(compiled) == 2
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize(("umask", "mode"), [(0, 0o644), (0o022, 0o644), (0o002, 0o644), (0o077, 0o600)])
def test_files_are_never_writable_by_others(
    folder: Path, compiled: list[object], umask: int, mode: int
) -> None:
    before = os.umask(umask)
    try:
        cached_cubin(GATHER, ARCHITECTURE)
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
@pytest.mark.parametrize(
    "heal",
    [partial(cached_cubin, GATHER, ARCHITECTURE), partial(compile_missing, ARCHITECTURE, [GATHER])],
    ids=["fetched", "in advance"],
)
def test_a_damaged_entry_heals_and_says_so(
    folder: Path,
    compiled: list[object],
    damage: Callable[[Path], object],
    message: str,
    heal: Callable[[], object],
) -> None:
    cached_cubin(GATHER, ARCHITECTURE)
    damage(folder)
    with pytest.warns(DamagedCache, match=message):
        heal()
    assert len(compiled) == 2
    assert cached_cubin(GATHER, ARCHITECTURE).read_bytes() == b"\x7fELF 2"
    assert compile_missing(ARCHITECTURE, [GATHER]) == 0


def test_only_what_is_compiled_counts_as_progress(folder: Path, compiled: list[Instantiation]) -> None:
    wanted = [
        Instantiation("kernels/gather.cuh", "gather", (("THREADS", count),)) for count in (64, 128, 256)
    ]
    cached_cubin(wanted[1], ARCHITECTURE)
    stages: list[tuple[str, int, int]] = []
    for _ in range(2):
        compile_missing(ARCHITECTURE, wanted, lambda *stage: stages.append(stage))
    assert stages == [("compiling kernels", done, 2) for done in range(3)]


def test_a_cubin_that_the_driver_refuses_is_replaced(
    folder: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {b"\x7fELF 1"}

    def load_function(cubin: Path, name: str, device_index: int, shared_bytes: int) -> Function:
        if cubin.read_bytes() in refused:
            raise RefusedCubin(f"the driver refuses {cubin.name}")
        return Function((cubin, name, shared_bytes), None, device_index, None)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "load_function", load_function)
    with pytest.warns(DamagedCache, match=r"gather-sm_90a-.*refuses .*compiled again"):
        found = module.load_kernel(GATHER, ARCHITECTURE, 0, 64)
    assert found.owner[0].read_bytes() == b"\x7fELF 2"
    assert module.load_kernel(GATHER, ARCHITECTURE, 0, 64) == found
    assert len(compiled) == 2
    # A kernel that was just compiled anew is not compiled a third time.
    refused.update({b"\x7fELF 2", b"\x7fELF 3"})
    with pytest.warns(DamagedCache), pytest.raises(EnvironmentProblem, match="refuses"):
        module.load_kernel(GATHER, ARCHITECTURE, 0, 64)
    assert len(compiled) == 3


def test_a_folder_that_cannot_be_written_is_an_error(
    folder: Path, compiled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file")
    with pytest.raises(EnvironmentProblem, match="MARLINQ_CACHE"):
        cached_cubin(GATHER, ARCHITECTURE)
    folder.unlink()

    def full(descriptor: int, mode: str) -> object:
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.os, "fdopen", full)
    with pytest.raises(EnvironmentProblem, match="No space left"):
        cached_cubin(GATHER, ARCHITECTURE)
    assert list(folder.iterdir()) == []


def test_spills_are_said_whenever_a_kernel_is_fetched(folder: Path, compiled: list[object]) -> None:
    for _ in range(2):
        with pytest.warns(KernelSpills, match=r"gather for sm_90a \(THREADS=128 SPILLS=1\).* 16 bytes"):
            cached_cubin(replace(GATHER, parameters=(*GATHER.parameters, ("SPILLS", 1))), ARCHITECTURE)
    assert len(compiled) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached_cubin(GATHER, ARCHITECTURE)
