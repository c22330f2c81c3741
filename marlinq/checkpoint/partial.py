"""The unfinished output folder, safe where other users can write.

Every file is opened relative to the folder's descriptor and without following links. Files that are links,
named pipes, or have a second hard link are refused, since this program did not make them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marlinq.checkpoint.header import fsync_folder
from marlinq.core.errors import OutputError
from marlinq.core.files import open_regular

_CHUNK = 1 << 24
TEMPORARY = ".tmp"
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside into a one-line :class:`OutputError`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some room" if full else "mend that"
        # The error has a file name relative to the folder.
        where = path / error.filename if isinstance(error.filename, str) else path
        raise OutputError(f"{where}: {error.strerror or error}; {advice}, then resume") from None


class PartialFolder:
    """An unfinished output folder, locked against other processes.

    Args:
        path: the folder; created where it does not exist.

    Attributes:
        existed: whether it existed before.

    Raises:
        OutputError: it can't be created, is no folder, or another process is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.existed = os.path.lexists(path)
        if not self.existed:
            try:
                path.mkdir(parents=True)
            except OSError as error:
                raise OutputError(f"{path}: can't be created ({error.strerror})") from None
        try:
            self._folder = os.open(path, _FOLDER)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                with writing(path):
                    raise
            raise OutputError(f"{path}: is not the folder of an unfinished run; move it away") from None
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise OutputError(f"{path}: another process is writing it; wait for it or stop it") from None

    def close(self) -> None:
        """Release the lock; the files stay."""
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1

    def names(self, folder: str = "") -> list[str]:
        """Relative paths of all files, also in subfolders."""
        listed = []
        with self._inner(folder) as inner, os.scandir(inner) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = f"{folder}/{entry.name}" if folder else entry.name
                listed += self.names(name) if entry.is_dir(follow_symlinks=False) else [name]
        return listed

    def create(self, name: str) -> int:
        """A descriptor of a new file, which replaces any of that name."""
        self.remove(name)
        return open_regular(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, dir_fd=self._folder)

    def open(self, name: str, flags: int = os.O_RDWR) -> int:
        """A descriptor of a file that an earlier run made.

        Raises:
            OSError: it is a link, no regular file, or has a second hard link.
        """
        descriptor = open_regular(name, flags | os.O_NOFOLLOW, dir_fd=self._folder)
        if os.fstat(descriptor).st_nlink != 1:
            os.close(descriptor)
            raise OSError(errno.EMLINK, "it has another name elsewhere, so no unfinished run made it", name)
        return descriptor

    def read(self, name: str, limit: int | None = None) -> bytes | None:
        """The content of a file that an earlier run made; None where there is none.

        Raises:
            OSError: it can't be read, has more than ``limit`` bytes, or does not fit into memory.
        """
        try:
            descriptor = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            try:
                data = file.read() if limit is None else file.read(limit + 1)
            except MemoryError:
                raise OSError(errno.ENOMEM, "it does not fit into memory", name) from None
        if limit is not None and len(data) > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit} bytes", name)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file durably and atomically."""
        temporary = name + TEMPORARY
        descriptor = self.create(temporary)
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def append(self, name: str, data: bytes) -> None:
        """Append to a file durably; after a failure it is cut back to its old size, if that is possible."""
        try:
            descriptor = self.open(name)
        except FileNotFoundError:
            descriptor = self.create(name)
        try:
            size = os.lseek(descriptor, 0, os.SEEK_END)
            try:
                _write_all(descriptor, data)
                os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def truncate(self, name: str, size: int) -> None:
        """Cut a file off after ``size`` bytes."""
        descriptor = self.open(name)
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove a file or link, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def copy(self, source: int, name: str) -> None:
        """Copy the file with the descriptor ``source`` to ``name``; missing subfolders are created."""
        folder, _, last = name.rpartition("/")
        with self._inner(folder, make=True) as inner:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(last, dir_fd=inner)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            target = open_regular(last, flags, dir_fd=inner)
            try:
                offset = 0
                while data := os.pread(source, _CHUNK, offset):
                    _write_all(target, data)
                    offset += len(data)
            finally:
                os.close(target)

    def move(self, out: Path) -> None:
        """Rename the folder to ``out``, after everything in it is durable.

        Raises:
            OutputError: the path of the unfinished folder now leads to another folder.
        """
        os.fsync(self._folder)
        if not self._is_there():
            raise OutputError(f"{self.path}: was replaced while it was written; start over")
        self.path.rename(out)
        fsync_folder(out.parent)

    def discard(self) -> None:
        """Remove the folder and the files in it, which has no subfolders."""
        for name in self.names():
            self.remove(name)
        if self._is_there():
            self.path.rmdir()

    def _is_there(self) -> bool:
        """Whether the path still leads to this folder."""
        mine, there = os.fstat(self._folder), self.path.lstat()
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def sync(self) -> None:
        """Make new names in the folder durable."""
        os.fsync(self._folder)

    @contextmanager
    def _inner(self, folder: str, *, make: bool = False) -> Iterator[int]:
        """A descriptor of a subfolder, reached without following links."""
        descriptor = os.dup(self._folder)
        try:
            for part in folder.split("/") if folder else ():
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                inner = os.open(part, _FOLDER, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
