"""Compiles the machine once, and every kernel to a library of its own."""

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

from emulation.faults import Planted, UnknownSite
from emulation.translation import translate

_MACHINE = Path(__file__).parent / "machine"
_PYTHON = ("instructions.py", "translation.py", "build.py")  # sources that decide what is built
_COMMON = ("-std=c++17", "-fPIC", "-g1", "-U_FORTIFY_SOURCE")
# The sanitizers' hooks are the machine's own: every plain access of a kernel goes through it. With -Og a
# compilation takes a quarter less than with -O1, and the few launches of a kernel hardly longer.
_KERNEL = (*_COMMON, "-Og", "-w", "-Wno-psabi", "-fno-exceptions", "-fsanitize=thread,bounds")


class CompilerFailure(Exception):
    """The host's compiler rejected a source; the message is the compiler's."""


def find_compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX``, or g++ or c++ on the path; None if there is none."""
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else shutil.which("g++") or shutil.which("c++")


@dataclass(frozen=True)
class Builder:
    """Builds libraries in a folder and keeps them there, keyed by content; several processes may share it.

    Attributes:
        folder: path of an existing folder, which must not move.
        compiler: path of GCC or Clang.
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
        """Digest of everything but the kernel that decides what is built."""
        folder = Path(__file__).parent
        # A kernel's library names the machine's by its path.
        digest = hashlib.sha256(self._version.encode() + bytes(self.folder.resolve()))
        for path in (*sorted(_MACHINE.iterdir()), *(folder / name for name in _PYTHON)):
            digest.update(path.name.encode() + path.read_bytes())
        return digest.digest()

    def _built(self, name: str, make: Callable[[Path], object], content: str = "") -> Path:
        """Path of the file ``name`` for ``content``; ``make`` builds it in an empty folder."""
        key = hashlib.sha256(self._key + content.encode()).hexdigest()[:32]
        path = self.folder / f"{key}-{name}"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as aside:
                make(Path(aside))
                (Path(aside) / name).replace(path)
        return path

    @functools.cached_property
    def _machine(self) -> Path:
        """Path of the machine's library, which all kernels share; one process builds it while others wait.

        Its sources are one translation unit: the standard library's headers are read once, and functions of
        one source can be inlined in others.
        """
        unit = "".join(f'#include "{source.name}"\n' for source in sorted(_MACHINE.glob("*.cpp")))
        # No other library replaces the machine's functions, so that they can be inlined.
        optimised = ("-O2", "-fno-semantic-interposition", "-Wl,-Bsymbolic")
        strict = ("-Wall", "-Wextra", "-Werror", "-Wl,-z,defs")
        options = (*_COMMON, *optimised, *strict, "-I", _MACHINE, "-shared")

        def make(aside: Path) -> None:
            (aside / "machine.cpp").write_text(unit, encoding="utf-8")
            self._run(*options, aside / "machine.cpp", "-o", aside / "machine.so")

        with (self.folder / "machine.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._built("machine.so", make)

    def preprocess(
        self, text: str, name: str, sources: Path, capability: int = 90, planted: Planted | None = None
    ) -> str:
        """``text`` as NVRTC would see it, with line markers that call it ``name``.

        Args:
            text: CUDA C++.
            name: file name for line markers.
            sources: folder of the headers that the text may include.
            capability: ten times the compute capability.
            planted: a fault; None for the sources as they are.

        Raises:
            CompilerFailure: the preprocessor rejected the text; its message.
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
        definitions = planted.definitions() if planted else ""
        return self._run(*options, "-", given=f'{definitions}#line 1 "{name}"\n{text}')

    def kernel(
        self, text: str, function: str, sources: Path, capability: int = 90, planted: Planted | None = None
    ) -> ctypes.CDLL:
        """The library of one kernel.

        Args:
            text: CUDA C++, one translation unit.
            function: name of its ``extern "C" __global__`` function.
            sources: folder of the headers that the text may include.
            capability: ten times the compute capability.
            planted: a fault; None for the sources as they are.

        Raises:
            CompilerFailure: the compiler rejected the kernel; its message.
            UnknownPtx: the source has PTX that the emulation lacks.
            UnknownSite: the kernel has no fault site of the planted fault's name.
        """
        # Launches of one kernel follow each other: the same sources are translated once.
        states = tuple((path, path.stat().st_mtime_ns) for path in sources.rglob("*.cuh"))
        key = text, function, capability, planted, states
        if key not in self._loaded:
            self._loaded[key] = self._load(text, function, sources, capability, planted)
        return self._loaded[key]

    @functools.cached_property
    def _loaded(self) -> dict[object, ctypes.CDLL]:
        return {}

    def _load(
        self, text: str, function: str, sources: Path, capability: int, planted: Planted | None
    ) -> ctypes.CDLL:
        preprocessed = self.preprocess(text, f"{function}.cu", sources, capability, planted)
        if planted and preprocessed == self.preprocess(text, f"{function}.cu", sources, capability):
            raise UnknownSite(
                f"{function} has no fault site {planted.site} for compute capability {capability}"
            )
        translated = translate(preprocessed, function)

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
        """Options of one compiler.

        GCC: variables keep their stack slots, because a product may use its registers when their C++ block
        has ended. Constants of one kernel don't replace those of another that is loaded too. Nobody asks for
        the entries and exits of functions. The names of its hooks tell alignments, which the machine checks:
        the sanitizer of alignments, which Clang needs, would take a fifth of a compilation.
        """
        if "clang" in self._version:
            return ("-fsanitize=alignment",)
        return "-fstack-reuse=none", "-fno-gnu-unique", "--param=tsan-instrument-func-entry-exit=0"
