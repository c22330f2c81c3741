"""Stores the allocation of a run for a run that resumes it."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from marlinq.checkpoint import CheckpointWriter, kept_json
from marlinq.core.errors import OutputError, UsageError
from marlinq.operations.quantize.allocation.chosen import Allocation, Uniform, target_text
from marlinq.operations.quantize.candidates import read_allocation
from marlinq.operations.quantize.recipe import Recipe

_FILE = "allocation.json"
_NUMBERS = {"int": int, "float": float, "bool": bool}
_MOST = 1 << 63


def keep_allocation(writer: CheckpointWriter, allocation: Allocation, recipe: Recipe) -> None:
    """Stores the allocation that was chosen for ``recipe`` in the unfinished folder."""
    writer.keep_json(_FILE, {"recipe": _asked(recipe), "allocation": asdict(allocation)})


def kept_allocation(out: Path, recipe: Recipe) -> Allocation | None:
    """The allocation that an unfinished run of ``out`` chose; None where it stored none.

    An altered file can't mix two runs: the modules become part of the recipe, whose fingerprint the journal
    checks, and sizes are counted anew from the plan. Only the estimated KL divergences are taken as stored.

    Raises:
        OutputError: that run had another recipe, or the file is damaged.
    """
    kept = kept_json(out, _FILE)
    if kept is None:
        return None
    try:
        asked, values = kept["recipe"], dict(kept["allocation"])
        uniform = {name: Uniform(**each) for name, each in values.pop("uniform").items()}
        modules = read_allocation(values.pop("modules"))
        allocation = Allocation(**values | {"target": target_text(recipe)}, modules=modules, uniform=uniform)
        _check_numbers(allocation)
        for each in uniform.values():
            _check_numbers(each)
        read_allocation(dict.fromkeys(uniform, ()))
    except (TypeError, KeyError, ValueError, AttributeError, UsageError):
        raise OutputError(f"{out}.partial/{_FILE}: is damaged; remove {out}.partial and start over") from None
    if asked != _asked(recipe):
        raise OutputError(
            f"{out}.partial: an unfinished run with other settings chose schemes there; repeat that run's "
            "command, or remove the folder"
        )
    return allocation


def _check_numbers(values: Allocation | Uniform) -> None:
    """Checks that every number has its field's type and is at least 0, finite and below 2**63.

    Raises:
        ValueError: a number is not; the error has its field's name.
    """
    for field in fields(values):
        value: Any = getattr(values, field.name)
        wanted: Any = _NUMBERS.get(str(field.type))
        if wanted is not None and (type(value) is not wanted or not 0 <= value < _MOST):
            raise ValueError(field.name)


def forget_allocation(writer: CheckpointWriter) -> None:
    """Removes the stored allocation from a folder that is about to be finished."""
    writer.remove(_FILE)


def _asked(recipe: Recipe) -> dict[str, Any]:
    """The keys and values of a recipe without its allocation."""
    values = recipe.to_dict()
    del values["allocation"]
    return values
