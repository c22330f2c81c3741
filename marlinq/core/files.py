"""Opening what a user, a recipe or a checkpoint names: regular files only, and without ever waiting.

Opening a named pipe for reading waits for a writer, and reading a device may never end.
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
    """What a file of this ``st_mode`` is, in words."""
    return next((kind for test, kind in _KINDS if test(mode)), "a regular file")


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """A descriptor of the regular file ``path``; ``flags`` and ``dir_fd`` as in ``os.open``.

    Raises:
        OSError: as ``os.open``, and EINVAL for what is no regular file.
    """
    # Opening a device can act on it, so it is looked at first, and again in case it was exchanged.
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
    """Put the file ``path`` with ``text`` into place at once; a link in its place is replaced, not followed.

    Raises:
        OSError: the folder can't be written.
    """
    # A name without a number: what a killed process left is replaced by the next one.
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
