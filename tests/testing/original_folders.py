"""Tiny checkpoints on disk, and comparing folders."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from marlinq.checkpoint.reader import REPORTS
from marlinq.methods import GPTQOptions
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.tiny_models import blocks_key, tiny_model

RECIPE = Recipe(group_size=32, samples=8, max_length=40, options=GPTQOptions(act_order="none"))
"""Recipe for a tiny model, which writes its own text in a moment."""

ROWS = Path(__file__).with_name("rows.jsonl")
"""File of eight documents of forty random tokens."""
READ = RECIPE.replace(calibration=str(ROWS))
"""``RECIPE`` with text from a file, which halves a run's time."""


def save_tiny(name: str, folder: Path, *, blocks: int | None = None) -> Path:
    """Saves the tiny model of that name as a checkpoint folder, with its usual number of blocks if None."""
    shutil.copytree(_made(name, blocks), folder, dirs_exist_ok=True)
    # As if the model had just been made: what a test draws does not depend on the tests before it.
    torch.manual_seed(0)
    return folder


@cache
def _made(name: str, blocks: int | None) -> Path:
    """The folder that is copied, made once a process."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    changes = {} if blocks is None else {blocks_key(name): blocks}
    tiny_model(name, **changes).save_pretrained(folder)
    return folder


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file of a folder, without its report, which holds times."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in REPORTS
    }
