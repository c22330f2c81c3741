"""Compiling: the machine once, then every variant of a kernel to a library of its own."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.emulation.translation import translate

_MACHINE = Path(__file__).parent / "machine"
_PYTHON = ("instructions.py", "translation.py", "build.py")
_COMMON = ("-std=c++17", "-fPIC", "-g1", "-U_FORTIFY_SOURCE")
# The sanitizers' hooks are the machine's own: every plain access of a kernel goes through it. With -Og a
# compilation takes a quarter less than with -O1, and the few launches of a kernel hardly longer.
_KERNEL = (*_COMMON, "-Og", "-w", "-Wno-psabi", "-fno-exceptions", "-fsanitize=thread,alignment,bounds")


class CompilerFailure(Exception):
    """The host's compiler rejected a source; the message is its own."""


def find_compiler() -> str | None:
    """The C++ compiler: ``$CXX``, or g++ or c++ on the path; None if there is none."""
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("c++")


@dataclass(frozen=True)
class Builder:
    """Builds libraries in ``folder``, where they stay: keyed by content, written aside and renamed.

    Attributes:
        folder: has to exist, and must not move.
        compiler: the path of GCC or Clang.
    """

    folder: Path
    compiler: str

    def _run(self, *arguments: object, given: str = "") -> str:
        command = [self.compiler, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, input=given)
        if done.returncode:
            raise CompilerFailure(f"{' '.join(command)}\n{done.stderr}")
        return done.stdout

    @functools.cached_property
    def _version(self) -> str:
        return self._run("--version")

    @functools.cached_property
    def _key(self) -> bytes:
        """Of everything but a kernel that decides what is built."""
        folder = Path(__file__).parent
        digest = hashlib.sha256(self._version.encode())
        for path in (*sorted(_MACHINE.iterdir()), *(folder / name for name in _PYTHON)):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.digest()

    def _built(self, name: str, make: Callable[[Path], object], content: str = "") -> Path:
        """The path of ``name`` for ``content``; ``make`` builds it in the empty folder that it is given."""
        key = hashlib.sha256(self._key + content.encode()).hexdigest()[:32]
        path = self.folder / f"{key}-{name}"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as aside:
                make(Path(aside))
                (Path(aside) / name).replace(path)
        return path

    @functools.cached_property
    def _machine(self) -> Path:
        """The machine's library, which all kernels share; processes that share the folder wait for the first.

        Its sources are one translation unit: the standard library's headers are read once, and functions of
        one source can be inlined in others.
        """
        unit = "".join(f'#include "{source.name}"\n' for source in sorted(_MACHINE.glob("*.cpp")))
        options = (*_COMMON, "-O2", "-Wall", "-Wextra", "-Werror", "-I", _MACHINE, "-shared", "-Wl,-z,defs")

        def make(aside: Path) -> None:
            (aside / "machine.cpp").write_text(unit, encoding="utf-8")
            self._run(*options, aside / "machine.cpp", "-o", aside / "machine.so")

        with (self.folder / "machine.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._built("machine.so", make)

    def preprocess(self, text: str, name: str, sources: Path, capability: int = 90) -> str:
        """``text`` as NVRTC would see it, with line markers that call it ``name``.

        Raises:
            CompilerFailure: the compiler's words.
        """
        # No header but the project's own: NVRTC has none either.
        options = [
            "-E",
            "-nostdinc",
            "-I",
            sources,
            "-x",
            "c++",
            "-std=c++17",
            f"-D__CUDA_ARCH__={capability}0",
        ]
        return self._run(*options, "-", given=f'#line 1 "{name}"\n{text}')

    def kernel(self, text: str, function: str, sources: Path, capability: int = 90) -> ctypes.CDLL:
        """The library of one variant.

        Args:
            text: a translation unit (:mod:`marlinq.kernels.contract.instantiation`).
            function: its ``extern "C" __global__`` function.
            sources: the folder of its headers.
            capability: ten times the compute capability.

        Raises:
            CompilerFailure: the compiler's words.
            UnknownPtx: the source has PTX that the emulation lacks.
        """
        # Launches of one kernel follow each other, for which the same sources need no translation again.
        states = tuple((path, path.stat().st_mtime_ns) for path in sources.rglob("*.cuh"))
        key = text, function, capability, states
        if key not in self._loaded:
            self._loaded[key] = self._load(text, function, sources, capability)
        return self._loaded[key]

    @functools.cached_property
    def _loaded(self) -> dict[object, ctypes.CDLL]:
        return {}

    def _load(self, text: str, function: str, sources: Path, capability: int) -> ctypes.CDLL:
        translated = translate(self.preprocess(text, f"{function}.cu", sources, capability), function)

        def make(aside: Path) -> None:
            (aside / "kernel.cpp").write_text(translated, encoding="utf-8")
            options = (*_KERNEL, *self._own_options, "-I", _MACHINE)
            self._run(*options, "-c", aside / "kernel.cpp", "-o", aside / "kernel.o")
            # Linked in a step of its own, without the sanitizers' libraries. Those of C++, which the machine
            # has, would take most of the linker's time.
            link = ("-shared", "-nostdlib", "-Wl,-z,defs", aside / "kernel.o", self._machine)
            self._run(*link, "-lm", "-lc", "-lgcc", "-o", aside / f"{function}.so")

        return ctypes.CDLL(str(self._built(f"{function}.so", make, translated)))

    @functools.cached_property
    def _own_options(self) -> tuple[str, ...]:
        """What GCC alone understands, and needs.

        Variables keep their stack slots, because a product may use its registers when their C++ block has
        ended. Constants of one kernel don't replace those of another that is loaded too. Nobody asks for the
        entries and exits of functions.
        """
        if "clang" in self._version:
            return ()
        return "-fstack-reuse=none", "-fno-gnu-unique", "--param=tsan-instrument-func-entry-exit=0"
