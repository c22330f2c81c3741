from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.tuning import cuda_graphs, loop
from tests.testing.original_folders import RECIPE, save_tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bloom"])
def test_recorded_passes_are_the_students_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = save_tiny(name, tmp_path / "model")
    # None of so few documents is held out, so the last values are kept.
    recipe = RECIPE.replace(samples=7, tune_steps=6, tune_tokens=4096, tune_codes=True, tune_rate=0.06)
    used: list[object] = []
    init = loop.Recorded.__init__

    def noted(self: loop.Recorded, *args: object) -> None:
        used.append(self)
        init(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(loop.Recorded, "__init__", noted)
    quantize(source, tmp_path / "kept", recipe=recipe, device="cuda")
    monkeypatch.setattr(cuda_graphs, "_SHARE_OF_FREE", 0.0)
    quantize(source, tmp_path / "again", recipe=recipe, device="cuda")
    assert len(used) == 2
    # Nor do hidden states stay on the device then.
    monkeypatch.setattr(loop, "_SMALL", 0)
    quantize(source, tmp_path / "direct", recipe=recipe, device="cuda")
    assert len(used) == 2
    report = json.loads((tmp_path / "kept" / "marlinq.json").read_text())["run"]["tuning"]
    assert report["changed_codes"] > 0
    # The same kernels on the same numbers.
    kept, again, direct = (
        load_file(tmp_path / way / "model.safetensors") for way in ("kept", "again", "direct")
    )
    assert kept.keys() == again.keys() == direct.keys()
    assert all(again[key].equal(direct[key]) for key in direct)
    assert all(kept[key].equal(direct[key]) for key in direct)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "bloom"])
def test_gradients_of_the_loss_are_the_same_each_time(tmp_path: Path, name: str) -> None:
    source = save_tiny(name, tmp_path / "model")
    recipe = RECIPE.replace(output_hessian=True)
    for out in ("one", "other"):
        report = quantize(source, tmp_path / out, recipe=recipe, device="cuda")
        assert all(module.fallback is None for module in report.modules.values())
    one, other = (load_file(tmp_path / out / "model.safetensors") for out in ("one", "other"))
    assert all(one[key].equal(other[key]) for key in one)
