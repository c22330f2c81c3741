"""Notes that a quantise run keeps in the journal of its unfinished folder, and reads when it is resumed."""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from marlinq.core.errors import OutputError
from marlinq.operations.quantize.planned_module import module_note
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.quantize_report import ModuleReport, planned_facts
from marlinq.operations.quantize.tuning import NOTE, TuningReport

TEXT = "calibration"
"""Key of the note about the calibration text."""
_MODULE = "module "
_TEXT_FIELDS: Mapping[str, Any] = {"source": str, "documents": int, "tokens": int}


def module_reports(notes: Mapping[str, Any]) -> dict[str, ModuleReport]:
    """The module reports in a writer's notes, by stored module name."""
    return {
        key.removeprefix(_MODULE): ModuleReport(**value)
        for key, value in notes.items()
        if key.startswith(_MODULE)
    }


def check_notes(notes: Mapping[str, Any], folder: Path) -> None:
    """Checks the fields and types of the notes of a run.

    Args:
        notes: the writer's notes.
        folder: folder of the journal, for messages.

    Raises:
        OutputError: a note has other fields or types.
    """
    for name, note in notes.items():
        fields = _TEXT_FIELDS if name == TEXT else None
        if name.startswith(_MODULE):
            fields = get_type_hints(ModuleReport)
        elif name == NOTE:
            fields = get_type_hints(TuningReport)
        if fields is None:
            continue
        exact = name != TEXT
        known = isinstance(note, dict) and (set(note) == set(fields) if exact else set(note) >= set(fields))
        if not known or not all(_fits(note[field], hint) for field, hint in fields.items()):
            raise OutputError(
                f"{folder}: the note {name!r} in its journal is damaged; remove the folder and start over"
            )


def check_planned(notes: Mapping[str, Any], plan: OutputPlan, folder: Path) -> None:
    """Checks that the notes of an interrupted run agree with the plan of the run that resumes it.

    Args:
        notes: notes that passed :func:`check_notes`.
        plan: plan of the resuming run.
        folder: folder of the journal, for messages.

    Raises:
        OutputError: a note is about a module, shape or scheme that the plan does not have.
    """
    planned = {module_note(each): each for each in plan.modules.values()}
    for name, note in notes.items():
        known = name in (TEXT, NOTE) or name in planned
        if name in planned:
            known = all(note[key] == value for key, value in planned_facts(planned[name]).items())
            # Without calibration, modules have seen no token.
            known &= plan.method.calibrated or note["tokens"] == 0
        if not known:
            raise OutputError(
                f"{folder}: the note {name!r} in its journal is not this run's; remove the folder and "
                "start over"
            )


def _fits(value: object, hint: Any) -> bool:
    """Whether a JSON value is of the annotated type of a field."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is not None:
        kind = dict if issubclass(origin, Mapping) else (list, tuple)
        return isinstance(value, kind)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return value in list(hint)
    if hint in (int, float):
        numbers = (int,) if hint is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)
