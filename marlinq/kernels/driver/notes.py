"""A note beside the compiled kernels of what a model's products need, so that it is found out once.

Deciding for every batch takes half a second, every time a model is loaded. The note rests on this room's
files too (decisions, measured choices, sources), and lists the variants' entries in the cache. Where all of
these are there, nothing is decided or compiled; a damaged one is noticed when it is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from marlinq.core.kept import is_kept
from marlinq.core.notes import note, note_name, noted
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.driver.cache import entry_path
from marlinq.kernels.driver.compiler import nvrtc_version


def is_complete(premises: object) -> bool:
    """Whether a note with these ``premises`` stands in the cache, and the entries that it lists do, too."""
    names = noted(_name(premises), lambda value: value)
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
    note(_name(premises), names, required=True)


def _name(premises: object) -> str:
    return note_name("complete", (premises, nvrtc_version()), ("kernels",))
