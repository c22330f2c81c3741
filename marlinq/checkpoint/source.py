"""Files of a checkpoint, held open while it is read, so that what they are can't change unnoticed."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marlinq.core.errors import CheckpointError
from marlinq.core.files import open_regular

# File systems stamp changes with a clock of a few milliseconds: a file that changed just now could change
# again within the same tick. Reading starts when that tick is over.
_TICK_SECONDS = 0.01


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say in one line that the system would not let ``path`` be read."""
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
    """One regular file that is read and must not change meanwhile.

    A file that is rewritten or replaced shows it in its size or times: both change the time of the last
    status change, and nothing can set that one back.

    Args:
        path: the file; it is closed when nothing refers to the object any more.

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
        """Make sure that the open file is as it was when it was opened.

        Raises:
            CheckpointError: it was rewritten, truncated or extended.
        """
        with reading(self.path):
            now = self._now()
        if now != self._state:
            raise CheckpointError(_changed(self.path, "was changed"))

    def check_place(self) -> None:
        """Make sure that the path still leads to the open file, and the file is as it was.

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
