from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.testing.verified_checkpoints import save_original, save_quantized


@pytest.fixture(scope="session")
def original(tmp_path_factory) -> Path:
    # A scale 1.4 times as large is at the limit of what can be told: with some seeds it is not found.
    return save_original(tmp_path_factory.mktemp("original") / "model", seed=2)


@pytest.fixture(scope="session")
def quantized(tmp_path_factory, original) -> Callable[..., Path]:
    """Quantised checkpoints by what they are made of, each written once; never change one, copy it."""
    made: dict[Any, Path] = {}

    def make(layout: str, **options: Any) -> Path:
        key = (layout, *sorted(options.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("quantized") / layout
            made[key] = save_quantized(original, out, layout, **options)
        return made[key]

    return make
