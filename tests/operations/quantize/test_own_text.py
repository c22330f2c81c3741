from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marlinq.operations.quantize import own_text, quantize
from tests.testing.original_folders import RECIPE, save_tiny


def test_a_model_that_repeats_itself_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, write, share = save_tiny("llama", tmp_path / "model", blocks=1), own_text._write, [1, 3]

    def looping(*given: Any) -> Any:
        (written,) = write(*given)
        return [replace(written, loops=len(written.documents) * share[0] // share[1])]

    monkeypatch.setattr(own_text, "_write", looping)
    # Any warning is an error here.
    quantize(source, tmp_path / "seldom", recipe=RECIPE, device="cpu")
    share[:] = 1, 2
    with pytest.warns(
        UserWarning, match=r"model: the model often repeats itself, .*; take all text from files"
    ):
        quantize(source, tmp_path / "often", recipe=RECIPE, device="cpu")
