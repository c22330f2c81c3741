"""The cache folder: compiled kernels, and notes of results that are slow to find again.

A compiled kernel is a program, and a note decides which program runs. So the folder must be as safe as ssh's:
it belongs to this user or to root, and others can't write to it or to any folder above it. Only regular files
of bounded size are read. A file is written under a temporary name and renamed, so any number of processes can
share the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import secrets
import stat
import time
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.files import open_regular

MAX_NOTE_BYTES = 16 << 20
"""Bytes of a note at most; the largest are parts of a tokenizer."""

_VARIABLE = "MARLINQ_CACHE"
_TEMPORARY = ".tmp"
# Temporary files older than this were left by killed processes; writing a file takes milliseconds.
_STALE_SECONDS = 3600.0
# A process that waits longer for its turn goes on: the other one may hang, and computing twice does no harm.
_MOST_WAIT_SECONDS, _POLL_SECONDS = 120.0, 0.05


class UntrustedCache(UserWarning):
    """The cache folder can't be trusted, so results that it may hold are computed again."""


def cache_folder() -> Path:
    """The cache folder: ``$MARLINQ_CACHE``, ``$XDG_CACHE_HOME/marlinq`` or ``~/.cache/marlinq``.

    Raises:
        EnvironmentProblem: neither variable is set, and the user has no home folder.
    """
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(base or Path.home() / ".cache") / "marlinq"
    except RuntimeError:
        raise EnvironmentProblem(
            f"the kernel cache: this user has no home folder; set {_VARIABLE} to a folder of yours"
        ) from None


def kept_path(name: str) -> Path:
    """The path of the file ``name`` in the cache folder.

    Raises:
        EnvironmentProblem: as :func:`cache_folder`.
    """
    return cache_folder() / "kernels" / name


def check_folder(folder: Path) -> None:
    """Check that only this user and root can change the files in ``folder``.

    Args:
        folder: folder to check; need not exist. The folders above it are checked, too.

    Raises:
        EnvironmentProblem: another user owns it, or it or a folder above it is writable by others.
    """
    advice = f"or set {_VARIABLE} to a folder of yours"
    try:
        real = Path(os.path.realpath(folder))
        trusted = {os.geteuid(), 0, Path("/").stat().st_uid}
        for each in (real, *real.parents):
            try:
                status = each.stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            if status.st_uid not in trusted:
                raise EnvironmentProblem(
                    f"{each}: belongs to user {status.st_uid}, who could exchange compiled kernels there; "
                    f"remove it, {advice}"
                )
            # In a sticky folder such as /tmp others can't rename or remove this user's files.
            sticky = each != real and status.st_mode & stat.S_ISVTX
            if writable_by_others(status) and not sticky:
                raise EnvironmentProblem(
                    f"{each}: others can write there, and could exchange compiled kernels; "
                    f"run chmod go-w {each}, {advice}"
                )
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise EnvironmentProblem(
            f"{str(folder)[:200]}: the kernel cache can't be used ({problem}); mend that, {advice}"
        ) from None


def writable_by_others(status: os.stat_result) -> bool:
    """Whether others than the owner may write; the owner's private group doesn't count as others."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid, status.st_uid)


def _is_private(group: int, user: int) -> bool:
    """Whether ``group`` is that of one user: many systems give each a group of the same name."""
    try:
        owner, private = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        owner.pw_gid == group and private.gr_name == owner.pw_name and set(private.gr_mem) <= {owner.pw_name}
    )


def read_kept(name: str, limit: int) -> bytes | None:
    """The content of the file ``name`` in the cache folder; None where there is none.

    Raises:
        EnvironmentProblem: the folder can't be trusted.
        OSError: it is no regular file, has more than ``limit`` bytes, or others can write it.
    """
    path = kept_path(name)
    check_folder(path.parent)
    try:
        descriptor = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if writable_by_others(status):
            raise OSError(errno.EPERM, "others can write it", str(path))
        data = file.read(limit + 1) if status.st_size <= limit else b""
    if max(status.st_size, len(data)) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return data


def write_kept(name: str, content: bytes) -> Path:
    """Write the file ``name`` in the cache folder atomically; the folder is made where it is missing.

    Returns:
        The file's path.

    Raises:
        EnvironmentProblem: the folder can't be trusted, or can't be written.
    """
    path = kept_path(name)
    check_folder(path.parent)
    try:
        _make(path.parent)
        _remove_stale(path.parent)
        _write(path, content)
    except OSError as error:
        raise EnvironmentProblem(
            f"{path.parent}: the kernel cache can't be written ({error.strerror}); "
            f"set {_VARIABLE} to a writable folder"
        ) from None
    return path


@contextlib.contextmanager
def one_process_at_a_time() -> Iterator[None]:
    """Inside, other processes that enter wait, so that they find the files that this one writes.

    Without effect where the folder can't be made, trusted or locked, as on some network file systems.
    """
    folder = -1
    try:
        path = kept_path("")
        check_folder(path)
        _make(path)
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        end = time.monotonic() + _MOST_WAIT_SECONDS
        while not _locked(folder) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
    except (EnvironmentProblem, OSError):
        pass
    try:
        yield
    finally:
        if folder >= 0:
            os.close(folder)


def _locked(descriptor: int) -> bool:
    """Whether the file is locked now for this descriptor; False where another one has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_kept(name: str) -> bool:
    """Whether the cache folder can be trusted and has a regular file ``name``."""
    try:
        path = kept_path(name)
        check_folder(path.parent)
        return stat.S_ISREG(path.lstat().st_mode)
    except (EnvironmentProblem, OSError):
        return False


def read_note(name: str) -> bytes | None:
    """The content of a note; None where there is none or it can't be read, since it can be computed again.

    Warns:
        UntrustedCache: the folder can't be trusted.
    """
    try:
        return read_kept(name, MAX_NOTE_BYTES)
    except OSError:
        return None
    except EnvironmentProblem as problem:
        warnings.warn(f"{problem}; going on without", UntrustedCache, stacklevel=2)
        return None


def write_note(name: str, content: bytes) -> None:
    """Write a note; does nothing where the folder can't be used, since a note can be computed again."""
    if len(content) <= MAX_NOTE_BYTES:
        with contextlib.suppress(EnvironmentProblem):
            write_kept(name, content)


def _make(folder: Path) -> None:
    """Make ``folder`` and missing folders above it, none writable by others whatever the umask is."""
    missing = []
    for each in (folder, *folder.parents):
        if each.exists():
            break
        missing.append(each)
    for each in reversed(missing):
        each.mkdir(mode=0o755, exist_ok=True)


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@cache
def _remove_stale(folder: Path) -> None:
    """Remove temporary files of processes that were killed; once in a process."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.endswith(_TEMPORARY):
                continue
            with contextlib.suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                    Path(entry.path).unlink()
