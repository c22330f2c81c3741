"""Python processes with large packages already imported, forked from a parent that imported them once.

Importing torch and transformers takes several seconds, most of the time of a test that starts a process. The
parent only imports: it has one thread, and no package has computed anything, so that a child finds the
packages as if it had imported them itself. Environment variables that packages read at import are the
parent's; a test of such variables must import fewer packages in the parent, or use :mod:`subprocess`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).parents[2]
TORCH = ("torch", "torch._dynamo", "torch.distributed.tensor")
"""The slowest imports, none of which reads an environment variable of marlinq or of the Hub."""
COMMANDS = ("marlinq.cli",)
"""The command line, which imports no heavy package; if a child has one, its command imported it."""
QUANTIZE = (*TORCH, "transformers.models.llama.modeling_llama", "marlinq.cli", "marlinq.operations.quantize")
"""All modules that quantising a tiny Llama imports."""


class Process:
    """A forked process with the methods of :class:`subprocess.Popen` that tests use."""

    def __init__(self, parent: Parent, pid: int, folder: Path) -> None:
        self._parent, self.pid, self._folder = parent, pid, folder
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._parent.ask({"ended": self.pid})
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """(stdout, stderr), once the process has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.01)
        return (self._folder / "stdout").read_text(), (self._folder / "stderr").read_text()

    def kill(self) -> None:
        """Kills the process, if it runs, and drops its output."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)


class Parent:
    """The process that imports ``modules`` and is forked."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.testing.forks", *modules],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def close(self) -> None:
        """Ends the parent by closing its input."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer to one request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@cache
def parent(modules: tuple[str, ...]) -> Parent:
    """The parent for ``modules``, one per session."""
    return Parent(modules)


def start(code: str, *, modules: tuple[str, ...], env: dict[str, str], cwd: Path | None = None) -> Process:
    """Starts a process that runs ``code`` like ``python -c``, with ``modules`` already imported."""
    folder = Path(mkdtemp(prefix="forked-"))
    request = {"code": code, "env": env, "cwd": str(cwd or Path.cwd()), "folder": str(folder)}
    forked = parent(modules)
    return Process(forked, forked.ask(request), folder)


def run(
    code: str,
    *,
    modules: tuple[str, ...],
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` to its end, like :func:`subprocess.run` with captured output."""
    process = start(code, modules=modules, env=dict(os.environ) if env is None else env, cwd=cwd)
    try:
        out, errors = process.communicate(timeout)
    finally:
        process.kill()
    assert process.returncode is not None
    return subprocess.CompletedProcess([code], process.returncode, out, errors)


def _serve() -> str | None:
    """Serves requests to fork. Returns the code to run in a child, and None in the parent at the end."""
    for line in sys.stdin:
        request = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                return _begin(request)
        print(json.dumps(answer), flush=True)
    return None


def _begin(request: dict[str, Any]) -> str:
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{request['folder']}/stdout", os.O_WRONLY | os.O_CREAT),
        (2, f"{request['folder']}/stderr", os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(name, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for as long as the process lasts
    sys.argv = ["-c"]
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    code: str = request["code"]
    return code


if __name__ == "__main__":
    for module in sys.argv[1:]:
        import_module(module)
    # Collected before forking: a collection in a child would copy all memory pages.
    gc.collect()
    gc.freeze()
    to_run = _serve()
    if to_run is not None:
        exec(compile(to_run, "<string>", "exec"), {"__name__": "__main__"})
