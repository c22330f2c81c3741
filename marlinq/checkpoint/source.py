"""Files of a checkpoint, kept open while it is read, so that changes are noticed."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marlinq.core.errors import CheckpointError
from marlinq.core.files import open_regular

# Seconds to wait after a file's last change before it is read. File systems stamp changes with a clock of a
# few milliseconds, so another change within the same tick would not be noticed.
_TICK_SECONDS = 0.01


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError inside, where ``path`` is read, into a one-line :class:`CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: can't be read ({error.strerror or error}); "
            "mend its permissions or copy it again"
        ) from None


class OpenFile:
    """An open file and its path. Reads are positioned, so threads can share it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset``; fewer at the end of the file."""
        with reading(self.path):
            return os.pread(self.descriptor, count, offset)

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """Fill ``buffer`` from ``offset``; False when the file ends first."""
        done = 0
        with reading(self.path):
            while done < len(buffer):
                count = os.preadv(self.descriptor, [buffer[done : done + (1 << 30)]], offset + done)
                if not count:
                    return False
                done += count
        return True


class SourceFile(OpenFile):
    """A regular file that must not change while it is read.

    Rewriting or replacing a file changes its size or the time of its last status change, which no program can
    set back.

    Args:
        path: the file; closed when the object is garbage-collected.

    Raises:
        CheckpointError: it can't be opened, or is no regular file.
    """

    def __init__(self, path: Path) -> None:
        with reading(path):
            super().__init__(path, open_regular(path))
            weakref.finalize(self, os.close, self.descriptor)
            self._state = self._now()
            age = time.time() - self._state[-1] / 1e9
            if 0 <= age < _TICK_SECONDS:
                time.sleep(_TICK_SECONDS - age)
                self._state = self._now()
        self.size = self._state[2]

    def _now(self) -> tuple[int, int, int, int, int]:
        return _state(os.fstat(self.descriptor))

    @property
    def times(self) -> tuple[int, int]:
        """Nanoseconds of the last change of the content and of the status."""
        return self._state[3:]

    def read_into(self, buffer: memoryview, offset: int) -> bool:
        """As :meth:`OpenFile.read_into`.

        Raises:
            CheckpointError: the file was changed since it was opened.
        """
        whole = super().read_into(buffer, offset)
        self.check_content()
        return whole

    def check_content(self) -> None:
        """Check that the content has not changed since the file was opened.

        Raises:
            CheckpointError: it was rewritten, truncated or extended.
        """
        with reading(self.path):
            now = self._now()
        if now != self._state:
            raise CheckpointError(_changed(self.path, "was changed"))

    def check_place(self) -> None:
        """Check that the path still leads to the open file, and that its content has not changed.

        Raises:
            CheckpointError: it was changed, replaced or removed.
        """
        self.check_content()
        try:
            there = self.path.stat()
        except OSError:
            raise CheckpointError(_changed(self.path, "was removed")) from None
        if _state(there) != self._state:
            raise CheckpointError(_changed(self.path, "was replaced"))


def _state(status: os.stat_result) -> tuple[int, int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _changed(path: Path, how: str) -> str:
    return f"{path}: {how} while it was read; run the command again from the start, and leave it as it is"
