"""Recipes as files."""

from __future__ import annotations

from pathlib import Path

import yaml

from marlinq.operations.quantize.recipe import Recipe


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write ``recipe`` as YAML that ``read_recipe`` turns into an equal value."""
    path.write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")
