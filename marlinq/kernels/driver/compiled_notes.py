"""A note in the cache folder that lists the compiled kernels of a model's products.

Deciding for every batch takes half a second each time a model is loaded. The note's key includes the files of
the kernels' room (decisions, measured choices, sources). If the note and all entries that it lists are in the
cache, nothing is decided or compiled. A damaged entry is noticed when its kernel is loaded.
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
    """Whether the cache holds a note for ``premises``, and all entries that it lists."""
    names = noted(_name(premises), lambda value: value)
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
    note(_name(premises), names, required=True)


def _name(premises: object) -> str:
    return note_name("complete", (premises, nvrtc_version()), ("kernels",))
