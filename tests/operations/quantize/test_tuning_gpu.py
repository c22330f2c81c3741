from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.tuning import loop
from tests.testing.original_folders import RECIPE, save_tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bloom"])
def test_recorded_passes_are_the_students_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = save_tiny(name, tmp_path / "model")
    # Of so few documents none is held out, so the last values are kept.
    recipe = RECIPE.replace(samples=7, tune_steps=6, tune_tokens=4096, tune_codes=True, tune_rate=0.05)
    used: list[object] = []
    init = loop.Recorded.__init__

    def noted(self: loop.Recorded, *args: object) -> None:
        used.append(self)
        init(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(loop.Recorded, "__init__", noted)
    quantize(source, tmp_path / "recorded", recipe=recipe, device="cuda")
    assert used
    monkeypatch.setattr(loop, "_SMALL", 0)
    quantize(source, tmp_path / "direct", recipe=recipe, device="cuda")
    assert len(used) == 1
    recorded, direct = (load_file(tmp_path / way / "model.safetensors") for way in ("recorded", "direct"))
    report = json.loads((tmp_path / "recorded" / "marlinq.json").read_text())["run"]["tuning"]
    assert report["changed_codes"] > 0
    # The same kernels on the same numbers.
    assert recorded.keys() == direct.keys()
    assert all(recorded[key].equal(direct[key]) for key in direct)
