"""Tiny checkpoints on disk, and comparing folders."""

from __future__ import annotations

from pathlib import Path

from marlinq.checkpoint.reader import REPORTS
from marlinq.methods import GPTQOptions
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.tiny_models import blocks_key, tiny_model

RECIPE = Recipe(group_size=32, samples=8, max_length=40, options=GPTQOptions(act_order="none"))
"""Small enough for a tiny model: its text is written by the model itself in a moment."""

ROWS = Path(__file__).with_name("rows.jsonl")
"""Eight documents of forty random tokens."""

READ = RECIPE.replace(calibration=str(ROWS))
"""The same with text that is there, which is half of a run's time."""


def save_tiny(name: str, folder: Path, *, blocks: int | None = None) -> Path:
    """Saves the tiny model of that name as a checkpoint folder, with its usual number of blocks if None."""
    changes = {} if blocks is None else {blocks_key(name): blocks}
    tiny_model(name, **changes).save_pretrained(folder)
    return folder


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """The content of every file of a folder by relative path; not of its report, which holds the time."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in REPORTS
    }
