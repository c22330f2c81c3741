"""A note in the kernel cache that lists the compiled kernels of a model's products.

Deciding for every batch takes half a second each time a model is loaded. The note's file name is a digest of
all that the decisions depend on, this package's files included. If a note exists and all entries that it
lists are in the cache, nothing is decided or compiled. A damaged entry is noticed when its kernel is loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from marlinq.core.kept import is_kept, read_note, write_kept
from marlinq.core.plain_values import load_json
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cache import entry_path
from marlinq.kernels.driver.compiler import nvrtc_version

_ROOM = Path(__file__).parents[1]


def is_complete(premises: object) -> bool:
    """Whether the cache holds a note for ``premises``, and all entries that it lists."""
    note = read_note(_note(premises))
    try:
        names = load_json(note or b"")
    except ValueError:
        return False
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    # Names with a path are refused, so that a note can't point outside the folder.
    return all(Path(name).name == name and is_kept(name) for name in names)


def note_complete(premises: object, wanted: Iterable[Instantiation], architecture: str) -> None:
    """Write the note for ``premises``; all of ``wanted`` must be compiled.

    Raises:
        EnvironmentProblem: the cache can't be trusted or written.
    """
    names = sorted(entry_path(instantiation, architecture).name for instantiation in wanted)
    write_kept(_note(premises), json.dumps(names).encode())


def _note(premises: object) -> str:
    key = hashlib.sha256(repr((premises, nvrtc_version(), code_digest(_ROOM))).encode()).hexdigest()
    return f"complete-{key[:32]}.json"


@lru_cache(maxsize=8)
def code_digest(room: Path) -> str:
    """SHA-256 of all files below ``room``, a folder of this package."""
    digest = hashlib.sha256()
    for path in sorted(path for path in room.rglob("*") if path.suffix in (".py", ".json", ".cuh", ".cu")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(room)} {len(data)} ".encode() + data)
    return digest.hexdigest()
