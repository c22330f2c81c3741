"""Lines about a long run, and the end of one that goes wrong."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import NumericsError
from marlinq.methods import METHODS
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.clock import BLOCKS
from marlinq.operations.quantize.watch import FAR_ABOVE_RTN, Watch, duration, stop_if_far_off
from marlinq.operations.verify import comparison
from tests.testing.original_folders import READ, save_tiny
from tests.testing.schemes import scheme


def test_lines_say_how_good_and_how_long() -> None:
    notes: dict[str, Any] = {"calibration": {}}
    said: list[str] = []
    steps: list[tuple[str, int, int]] = []
    now = 0.0
    watch = Watch(
        lambda *step: steps.append(step), said.append, SimpleNamespace(notes=notes), clock=lambda: now
    )
    watch(BLOCKS, 0, 20)
    for block in range(20):
        now += 6.0
        notes[f"module layers.{block}.a"] = {"relative_error": 1e-3 * (block + 1), "quantity": "outputs"}
        notes[f"module layers.{block}.b"] = {"relative_error": 1e-3, "quantity": "outputs"}
        watch(BLOCKS, block + 1, 20)
    assert len(steps) == 21
    # The first block, then one every 15 s, which 6 s a block make every third; none at the end.
    assert len(said) == 1 + 18 // 3
    assert said[0] == (
        "block 1 of 20: output error 1.00e-03 median so far, 1.00e-03 in layers.0.a; "
        "6.0 s a block, 114 s left"
    )
    assert said[1].startswith("block 4 of 20: output error 1.00e-03 median so far, 4.00e-03 in layers.3.a")
    assert said[-1].endswith("6.0 s a block, 6 s left")


def test_blocks_of_an_earlier_run_are_not_counted() -> None:
    notes: dict[str, Any] = {"module layers.0.a": {"relative_error": 1.0, "quantity": "outputs"}}
    said: list[str] = []
    now = 0.0
    watch = Watch(lambda *step: None, said.append, SimpleNamespace(notes=notes), clock=lambda: now)
    for done in range(3):
        watch(BLOCKS, done, 5)
    assert said == []
    now = 10.0
    notes["module layers.2.a"] = {"relative_error": 3.0, "quantity": "outputs"}
    watch(BLOCKS, 3, 5)
    (line,) = said
    assert line == (
        "block 3 of 5: output error 2.00e+00 median so far, 3.00e+00 in layers.2.a; 3.3 s a block, 7 s left"
    )


def test_durations_are_readable() -> None:
    assert [duration(s) for s in (0.4, 119, 120, 7100, 7200)] == ["0 s", "119 s", "2 min", "118 min", "2.0 h"]


def test_nonsense_is_far_off_and_rounding_never_is() -> None:
    assert FAR_ABOVE_RTN == comparison.FAR_ABOVE_RTN
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    rounded = round_to_nearest(weight, scheme())
    stop_if_far_off([("layers.0.up", weight, rounded)])
    with pytest.raises(
        NumericsError, match=r"^layers\.0\.up: .* times as far .*'\^layers\\\.0\\\.up\$=skip'"
    ):
        stop_if_far_off([("layers.0.up", weight.roll(1, 0), rounded)])


def test_one_module_among_many_of_its_shape_is_named() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(n, 128, generator=generator) for n in (64, 32, 64, 64, 32)]
    solved = [
        (f"experts.{i}", weight, round_to_nearest(weight, scheme())) for i, weight in enumerate(weights)
    ]
    stop_if_far_off(solved)
    for number, (name, weight, rounded) in enumerate(solved):
        wrong = (name, weight.roll(1, 0), rounded)
        with pytest.raises(NumericsError, match=rf"^{name}: "):
            stop_if_far_off([*solved[:number], wrong, *solved[number + 1 :]])


def test_a_weight_on_its_grid_is_not_far_off() -> None:
    weight = round_to_nearest(torch.randn(64, 128), scheme()).dequantize()
    stop_if_far_off([("layers.0.up", weight, round_to_nearest(weight, scheme()))])
    stop_if_far_off(
        [("layers.0.zero", torch.zeros(64, 128), round_to_nearest(torch.zeros(64, 128), scheme()))]
    )


def test_a_run_ends_at_a_module_that_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    solve = METHODS["gptq"].solve

    def spoiled(weights: list[Tensor], *args: Any, names: list[str], **kwargs: Any) -> Any:
        spoil = names[0].endswith("layers.1.mlp.down_proj")
        wrong = [weight.roll(1, 0) if spoil else weight for weight in weights]
        return solve(wrong, *args, names=names, **kwargs)

    monkeypatch.setattr(METHODS["gptq"], "solve", spoiled)
    with pytest.raises(NumericsError, match=r"^model\.layers\.1\.mlp\.down_proj: .*--tokens.*--damp.*skip"):
        quantize(source, tmp_path / "out", recipe=READ, device="cpu")
    assert not (tmp_path / "out").exists()
    # Blocks before it are kept, and a sound run goes on from there.
    monkeypatch.undo()
    report = quantize(source, tmp_path / "out", recipe=READ, device="cpu", resume=True)
    assert report.resumed_blocks == 1


def test_modules_that_no_text_calibrated_are_not_judged() -> None:
    # A mixture that is rounded to nearest has none.
    stop_if_far_off(())
