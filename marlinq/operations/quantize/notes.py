"""What a quantise run notes in the journal of its unfinished folder, and what it takes up from there."""

from __future__ import annotations

import types
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from marlinq.core.errors import OutputError
from marlinq.operations.quantize.planning import OutputPlan, module_note
from marlinq.operations.quantize.report import ModuleReport, planned_facts
from marlinq.operations.quantize.tuning import NOTE, TuningReport

TEXT = "calibration"
"""Name of the note about the calibration text."""
_MODULE = "module "
_TEXT_FIELDS: Mapping[str, Any] = {"source": str, "documents": int, "tokens": int}


def module_reports(notes: Mapping[str, Any]) -> dict[str, ModuleReport]:
    """The reports that a writer's notes hold, by stored module name."""
    return {
        key.removeprefix(_MODULE): ModuleReport(**value)
        for key, value in notes.items()
        if key.startswith(_MODULE)
    }


def check_notes(notes: Mapping[str, Any], folder: Path) -> None:
    """Make sure that the notes of a run have the fields and types of ours.

    Args:
        notes: as a writer has them.
        folder: they were found in.

    Raises:
        OutputError: one has not.
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
    """Make sure that notes which a run takes up are about what it plans, as far as the plan can tell.

    Args:
        notes: after :func:`check_notes`.
        plan: of the run.
        folder: they were found in.

    Raises:
        OutputError: one is about something else.
    """
    planned = {module_note(each): each for each in plan.modules.values()}
    for name, note in notes.items():
        known = name in (TEXT, NOTE) or name in planned
        if name in planned:
            known = all(note[key] == value for key, value in planned_facts(planned[name]).items())
            # A method that reads no text has seen no token.
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
