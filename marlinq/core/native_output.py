"""What compiled code prints on stdout by itself, past Python.

The tokenizers library prints keys of a checkpoint's files that it does not know. On stdout they would spoil
``--json``, and as they are act on a terminal.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marlinq.core.command import command_line

_STDOUT = 1
_LONGEST = 300


@contextmanager
def told_as_warning(folder: Path) -> Iterator[None]:
    """Around a library that reads files of ``folder``, in the command line; other programs may have threads
    that print meanwhile.

    Warns:
        UserWarning: the library printed something on stdout.
    """
    try:
        usual = os.dup(_STDOUT) if command_line() is not None else None
    except OSError:
        # stdout is closed.
        usual = None
    if usual is None:
        yield
        return
    caught = os.memfd_create("stdout")
    try:
        os.dup2(caught, _STDOUT)
        try:
            yield
        finally:
            os.dup2(usual, _STDOUT)
        text = os.pread(caught, 4 * _LONGEST, 0).decode("utf-8", "replace")
    finally:
        os.close(caught)
        os.close(usual)
    if text:
        line = " ".join(text.split())
        warnings.warn(
            f"{folder}: printed while its tokenizer or processor was read: {line[:_LONGEST]}", stacklevel=3
        )
