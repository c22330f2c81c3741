"""Render a checkpoint's chat template in a process of bounded time and memory.

A template is a program. Jinja's sandbox keeps it from files, but not from ``9**9**9`` or a text of a
terabyte, and no signal interrupts those. So it runs in a fork of this process, with limits that the operating
system enforces. The fork computes with no tensor, starts no thread, and exits without cleaning up.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

SECONDS = 5.0
"""Seconds of processor time that a template may take; an honest one takes milliseconds."""

WAITING_SECONDS = 60.0
"""Seconds of wall-clock time that a template may take, on a busy machine."""

MEMORY_BYTES = 512 << 20
"""Bytes of memory that a template may take, beyond those of this process."""

MAX_TEXT_BYTES = 64 << 20
"""Bytes of the rendered text at most."""

_CHUNK = 1 << 16
# File with a process's memory in pages, on Linux.
_PAGES = Path("/proc/self/statm")
_MADE, _FAILED = b"+", b"-"


class Confined(Exception):
    """The confined function raised an exception, or reached a limit; the text says which."""


def confined(make: Callable[[], str]) -> str:
    """The text that ``make`` returns in a forked process.

    Raises:
        Confined: ``make`` raises something, or takes too much time or memory.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forks while other threads may hold locks; the child takes no lock of theirs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            _run(make, writing)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        answer = _read(reading, time.monotonic() + WAITING_SECONDS)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    text = answer[1:].decode("utf-8", "surrogatepass")
    if answer[:1] == _MADE:
        return text
    if answer[:1] == _FAILED:
        raise Confined(text)
    if os.waitstatus_to_exitcode(status) in (-signal.SIGXCPU, -signal.SIGKILL):
        raise Confined(f"it took more than {SECONDS:.0f} s")
    raise Confined("its process died")


def _run(make: Callable[[], str], writing: int) -> None:
    """In the forked process: make the text, and write it to the pipe ``writing``."""
    seconds = max(1, round(SECONDS))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if _PAGES.exists():
        limit = int(_PAGES.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        answer = _MADE + make().encode("utf-8", "surrogatepass")
    except MemoryError:
        answer = _FAILED + b"more memory than a text takes"
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other process tells of it
        line = " ".join(f"{type(error).__name__}: {error}".split())
        answer = _FAILED + line[:1000].encode("utf-8", "surrogatepass")
    view = memoryview(answer)
    while view:
        view = view[os.write(writing, view) :]


def _read(reading: int, until: float) -> bytes:
    """Bytes from the pipe ``reading``, until its end, :data:`MAX_TEXT_BYTES`, or the time ``until``."""
    parts: list[bytes] = []
    size = 0
    while size <= MAX_TEXT_BYTES:
        ready, _, _ = select.select([reading], [], [], max(0.0, until - time.monotonic()))
        piece = os.read(reading, _CHUNK) if ready else b""
        if not piece:
            # After the time is up, what has been read is discarded.
            return b"".join(parts) if ready else b""
        parts.append(piece)
        size += len(piece)
    return _FAILED + b"a text of more than %d bytes" % MAX_TEXT_BYTES
