"""Notes: results that are slow to find, kept in the cache folder for later processes.

A note's file name is a digest of all that its value depends on, files of this package included. The file
begins with the digest of the rest; a damaged note counts as missing. :mod:`marlinq.core.kept` decides which
folders are trusted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from marlinq.core.kept import read_note, write_kept, write_note
from marlinq.core.plain_values import load_json

_PACKAGE = Path(__file__).parents[1]
_Value = TypeVar("_Value")


def note_name(kind: str, premises: object, rooms: Iterable[str]) -> str:
    """The file name of a note.

    Args:
        kind: kind of its value, with which the name begins.
        premises: values that the note depends on, compared by ``repr``.
        rooms: parts of this package whose files it depends on.
    """
    code = [code_digest(room) for room in rooms]
    return f"{kind}-{hashlib.sha256(repr((premises, code)).encode()).hexdigest()[:32]}.json"


def noted(name: str, made_of: Callable[[Any], _Value]) -> _Value | None:
    """A note's value, converted by ``made_of``; None where there is no note, or a damaged one."""
    digest, _, content = (read_note(name) or b"").partition(b"\n")
    if digest != hashlib.sha256(content).hexdigest().encode():
        return None
    try:
        return made_of(load_json(content))
    except (ValueError, TypeError, KeyError):
        return None


def note(name: str, value: object, *, required: bool = False) -> None:
    """Write a note with a plain value; does nothing where the folder can't be written, unless ``required``.

    Raises:
        EnvironmentProblem: the note is ``required``, and the folder can't be trusted or written.
    """
    content = json.dumps(value).encode()
    content = hashlib.sha256(content).hexdigest().encode() + b"\n" + content
    if required:
        write_kept(name, content)
    else:
        write_note(name, content)


@lru_cache(maxsize=8)
def code_digest(room: str) -> str:
    """Digest of the files of a part of this package."""
    digest = hashlib.sha256()
    folder = _PACKAGE / room
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".json", ".cuh", ".cu")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(data)} ".encode() + data)
    return digest.hexdigest()
