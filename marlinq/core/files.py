"""Open files whose names come from a user, a recipe or a checkpoint; only regular files are accepted.

Opening a named pipe would wait for a writer, and reading a device might never end.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symbolic link"),
)


def kind_of(mode: int) -> str:
    """Kind of file of a ``st_mode`` in words, such as ``a folder``."""
    return next((kind for test, kind in _KINDS if test(mode)), "a regular file")


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """A descriptor of the regular file ``path``; ``flags`` and ``dir_fd`` as in ``os.open``.

    Raises:
        OSError: as ``os.open``, and EINVAL for anything but a regular file.
    """
    # Opening a device can act on it, so the kind is checked before opening, and again after, in case the file
    # was exchanged in between.
    follow = not flags & os.O_NOFOLLOW
    if not flags & os.O_CREAT:
        _refuse_others(os.stat(path, dir_fd=dir_fd, follow_symlinks=follow), path)
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, 0o666, dir_fd=dir_fd)
    try:
        _refuse_others(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_others(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of(status.st_mode)}, not a regular file", os.fspath(path))


def replace_text(path: Path, text: str) -> None:
    """Replace the file ``path`` by one with ``text``, atomically; a link is replaced, not followed.

    Raises:
        OSError: the folder can't be written.
    """
    # Always the same temporary name, so that the next call removes what a killed process left.
    temporary = path.parent / f".{path.name}.partial"
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """The content of the regular file ``path``.

    Raises:
        OSError: as :func:`open_regular`, and EFBIG for a file of more than ``limit`` bytes.
    """
    with open(open_regular(path), "rb") as file:
        data = file.read() if limit is None else file.read(limit + 1)
        if limit is not None and len(data) > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit} bytes", os.fspath(path))
        return data
