"""A note in the kernel cache of what a model's products need, so that it is found out once.

Deciding for every batch takes half a second, every time a model is loaded. The note is named for everything
that the decisions rest on, this package's own files included, and lists the variants' entries in the cache.
Where all of these are there, nothing is decided or compiled; a damaged one is noticed when it is loaded.
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
    """Whether a note with these ``premises`` stands in the cache, and the entries that it lists do, too."""
    note = read_note(_note(premises))
    try:
        names = load_json(note or b"")
    except ValueError:
        return False
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    # Nothing outside the folder is looked at, whatever stands in the note.
    return all(Path(name).name == name and is_kept(name) for name in names)


def note_complete(premises: object, wanted: Iterable[Instantiation], architecture: str) -> None:
    """Leave the note: ``wanted`` are all compiled.

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
    """A digest of the files of a part of this package; of this one: decisions, measured choices, sources."""
    digest = hashlib.sha256()
    for path in sorted(path for path in room.rglob("*") if path.suffix in (".py", ".json", ".cuh", ".cu")):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(room)} {len(data)} ".encode() + data)
    return digest.hexdigest()
