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
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.emulation.translation import translate

_MACHINE = Path(__file__).parent / "machine"
_PYTHON = ("instructions.py", "translation.py", "build.py")
_COMMON = ("-std=c++17", "-fPIC", "-g1", "-U_FORTIFY_SOURCE")
# The sanitizers' hooks are the machine's own: every plain access of a kernel goes through it.
_KERNEL = (*_COMMON, "-O1", "-w", "-Wno-psabi", "-fsanitize=thread,alignment,bounds")


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

    def _objects(self, options: tuple[str, ...]) -> list[Path]:
        """Of the machine's sources; processes that share the folder share the work."""
        sources = sorted(_MACHINE.glob("*.cpp"))
        found: dict[Path, Path] = {}

        def compile_to(aside: Path, source: Path) -> None:
            self._run(*options, "-c", source, "-o", aside / f"{source.stem}.o")

        while len(found) < len(sources):
            before = len(found)
            for source in sources:
                if source in found:
                    continue
                with (self.folder / f"{source.stem}.lock").open("w") as lock:
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    found[source] = self._built(f"{source.stem}.o", partial(compile_to, source=source))
            if len(found) == before:
                time.sleep(0.05)
        return [found[source] for source in sources]

    @functools.cached_property
    def _machine(self) -> Path:
        """The machine's library, which all kernels share."""
        objects = self._objects((*_COMMON, "-O2", "-Wall", "-Wextra", "-Werror"))
        return self._built(
            "machine.so",
            lambda aside: self._run("-shared", "-Wl,-z,defs", *objects, "-o", aside / "machine.so"),
        )

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
            text: a translation unit (:mod:`marlinq.kernels.jit.instantiation`).
            function: its ``extern "C" __global__`` function.
            sources: the folder of its headers.
            capability: ten times the compute capability.

        Raises:
            CompilerFailure: the compiler's words.
            UnknownPtx: the source has PTX that the emulation lacks.
        """
        translated = translate(self.preprocess(text, f"{function}.cu", sources, capability), function)

        def make(aside: Path) -> None:
            (aside / "kernel.cpp").write_text(translated, encoding="utf-8")
            options = (*_KERNEL, *self._own_options, *self._parsed, "-I", _MACHINE)
            self._run(*options, "-c", aside / "kernel.cpp", "-o", aside / "kernel.o")
            # Linked in a step of its own, without the sanitizers' libraries.
            link = ("-shared", "-Wl,-z,defs", aside / "kernel.o", self._machine)
            self._run(*link, "-o", aside / f"{function}.so")

        return ctypes.CDLL(str(self._built(f"{function}.so", make, translated)))

    @functools.cached_property
    def _own_options(self) -> tuple[str, ...]:
        """What GCC alone understands, and needs.

        Variables keep their stack slots, because a product may use its registers when their C++ block has
        ended. Constants of one kernel don't replace those of another that is loaded too.
        """
        return () if "clang" in self._version else ("-fstack-reuse=none", "-fno-gnu-unique")

    @functools.cached_property
    def _parsed(self) -> tuple[str, ...]:
        """The machine's header precompiled, which takes a third of a kernel's time off; GCC alone."""
        if not self._own_options:
            return ()
        name = "instructions.h.gch"
        options = (*_KERNEL, *self._own_options, "-x", "c++-header", _MACHINE / "instructions.h")
        path = self._built(name, lambda aside: self._run(*options, "-o", aside / name))
        # The compiler adds the suffix; the header itself is not read again where the kernel includes it.
        return ("-include", str(path.with_suffix("")))
