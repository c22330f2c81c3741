"""Tuning: what becomes of codes, scales, norms and the head, in every format and architecture."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import marlinq
from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import UnsupportedError
from marlinq.operations.quantize import plan_quantize, prepare, quantize, solve
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.tuning import loop
from marlinq.operations.quantize.tuning.student import Student, backward_kept
from tests.operations.quantize.tuning.runs import TUNED, begun, kept, kl, tuned, untuned, weights
from tests.testing.mixtures import save_mixture
from tests.testing.original_folders import folder_bytes, save_tiny
from tests.testing.pairs import in_turn


def test_predictions_come_closer_to_the_originals(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=2)
    plain, out = tmp_path / "plain", tmp_path / "tuned"
    recipe = begun(source, plain, out, samples=64, tune_steps=16, tune_rate=0.006)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "tune", lambda *args, **options: None)
        quantize(source, plain, recipe=recipe, device="cpu", resume=True)
    report = quantize(source, out, recipe=recipe, device="cpu", resume=True).tuning
    assert report is not None
    assert report["kl_after"] < 0.97 * report["kl_before"]
    assert (report["documents"], report["held_out"]) == (60, 4)
    assert report["steps"] <= 16
    # On text of another seed than both the learnt and the held-out text, which is the same for both folders.
    assert kl(out, source) < 0.97 * kl(plain, source)


def test_codes_stay_unless_they_are_to_follow(tmp_path: Path, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    # None of so few documents is held out, so the last values are kept, better or not.
    few = {"samples": 7, "tune_rate": 0.05, "tune_steps": 6}
    quantize(source, tmp_path / "plain", recipe=rounded.replace(**few | {"tune_steps": 0}), device="cpu")
    assert tuned(source, tmp_path / "scales", rounded, **few)["changed_codes"] == 0
    share = tuned(source, tmp_path / "codes", rounded, tune_codes=True, **few)["changed_codes"]
    plain, scales, codes = (weights(tmp_path / name) for name in ("plain", "scales", "codes"))
    assert all(torch.equal(plain[name].codes, scales[name].codes) for name in plain)
    assert any(not torch.equal(plain[name].scales, scales[name].scales) for name in plain)
    assert all(torch.equal(plain[name].zeros, codes[name].zeros) for name in plain)
    changed = sum(int((plain[name].codes != codes[name].codes).sum()) for name in plain)
    assert share == changed / sum(weight.codes.numel() for weight in plain.values())
    assert share > 0


def test_a_block_takes_its_step_before_the_next_has_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe
) -> None:
    """The same bytes as when all wait for the last, with the gradients of one block at a time."""
    source = save_tiny("llama", tmp_path / "model")
    recipe = rounded.replace(tune_codes=True, tune_steps=3, tune_rate=0.02)
    taken: list[set[str]] = []
    take = loop.Loop._take

    def noted(self: loop.Loop) -> None:
        blocks = {
            name.split(".layers.")[-1][0] for name, leaf in self._leaves.items() if leaf.grad is not None
        }
        # The norm behind the blocks comes with the last one.
        taken.append(blocks - {"m"})
        take(self)
        assert self._passes.keeps_gradients or all(leaf.grad is None for leaf in self._leaves.values())

    monkeypatch.setattr(loop.Loop, "_take", noted)
    quantize(source, tmp_path / "at once", recipe=recipe, device="cpu")
    # The last call finds nothing left.
    assert taken == [{"2"}, {"1"}, {"0"}, set()] * 3
    taken.clear()
    monkeypatch.setattr(loop.Direct, "keeps_gradients", True)
    quantize(source, tmp_path / "together", recipe=recipe, device="cpu")
    assert taken == [{"0", "1", "2"}] * 3
    assert folder_bytes(tmp_path / "at once") == folder_bytes(tmp_path / "together")


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_kept_passes_are_those_that_run_blocks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe, name: str
) -> None:
    source = save_tiny(name, tmp_path / "model", blocks=2)
    recipe = rounded.replace(tune_codes=True, tune_steps=3, tune_rate=0.02)
    quantize(source, tmp_path / "again", recipe=recipe, device="cpu")
    used = []

    class Keeping:
        keeps_gradients = True

        def __init__(self, student: Student) -> None:
            self.forward = student.forward_kept

        def backward(
            self, batch: int, inputs: Any, gradient: torch.Tensor, after_block: object = None
        ) -> None:
            used.append(batch)
            backward_kept(inputs, gradient)
            assert inputs == []

    monkeypatch.setattr(loop, "Direct", Keeping)
    quantize(source, tmp_path / "kept", recipe=recipe, device="cpu")
    assert used
    assert folder_bytes(tmp_path / "again") == folder_bytes(tmp_path / "kept")


def test_a_model_without_a_head_is_not_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    build = prepare.build_blueprint
    monkeypatch.setattr(
        prepare, "build_blueprint", lambda *args, **options: replace(build(*args, **options), head=None)
    )
    for run_it in (tuned, lambda *places: plan_quantize(*places, recipe=TUNED, device="cpu")):
        with pytest.raises(UnsupportedError, match="tuning needs an output head.*--tune-steps 0"):
            run_it(source, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_norms_are_tuned_or_left_alone(tmp_path: Path, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    report = tuned(source, tmp_path / "with", rounded)
    assert tuned(source, tmp_path / "without", rounded, tune_norms=False)["vectors"] == []
    original = {name: Checkpoint.open(source).tensor(name) for name in Checkpoint.open(source).tensors}
    differing = [
        name for name, tensor in kept(tmp_path / "with").items() if not torch.equal(tensor, original[name])
    ]
    assert sorted(differing) == report["vectors"] != []
    assert all(name.endswith("norm.weight") for name in differing)
    assert all(torch.equal(tensor, original[name]) for name, tensor in kept(tmp_path / "without").items())


@pytest.mark.parametrize(
    ("layout", "symmetric"), in_turn(("gptq", "awq", "compressed-tensors"), (True, False))
)
def test_every_format_holds_a_tuned_model(
    tmp_path: Path, rounded: Recipe, layout: str, symmetric: bool
) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    # None of so few documents is held out, so the last values are kept, better or not.
    changes = {"samples": 7, "tune_codes": True, "tune_steps": 2}
    tuned(source, tmp_path / "out", rounded, format=layout, symmetric=symmetric, **changes)
    marlinq.convert(tmp_path / "out", tmp_path / "other", target_format="gptq-v2")
    # The converted folder knows from its source which vectors are no copies.
    for folder in ("out", "other"):
        checked = marlinq.verify(tmp_path / folder, against=source, device="cpu")
        assert checked.ok, checked.render()
        assert "3 tuned, near the original's" in checked.render()
    here, there = weights(tmp_path / "out"), weights(tmp_path / "other")
    assert all(here[name].difference(there[name]) is None for name in here)


@pytest.mark.parametrize(
    "name", ["llama-tied", "gpt2", "opt", pytest.param("gemma3", marks=pytest.mark.slow), "bloom", "phi"]
)
def test_other_architectures(tmp_path: Path, rounded: Recipe, name: str) -> None:
    source = save_tiny(name, tmp_path / "model")
    report = tuned(source, tmp_path / "out", rounded, tune_codes=True)
    assert report["kl_after"] < report["kl_before"]


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_codes_of_experts_follow_where_files_hold_them_apart_or_stacked(
    tmp_path: Path, rounded: Recipe, fused: bool
) -> None:
    source = tmp_path / "model"
    save_mixture(source, "mixtral", fused=fused)
    # None of so few documents is held out, so the last values are kept, better or not.
    few = {"samples": 7, "tune_rate": 0.05, "tune_steps": 3}
    # The codes start from the original's weights, which the tuning reads once more.
    assert tuned(source, tmp_path / "out", rounded, tune_codes=True, **few)["changed_codes"] > 0
    assert marlinq.verify(tmp_path / "out", against=source, device="cpu").ok


def test_a_quantised_head_stays_as_it_was(tmp_path: Path) -> None:
    source = save_tiny("llama-tied", tmp_path / "model")
    recipe = TUNED.replace(quantize_head="int4", tune_steps=6)
    plain = untuned(source, tmp_path / "plain", recipe)
    report = tuned(source, tmp_path / "out", recipe)
    assert report["kl_after"] < report["kl_before"]
    assert weights(tmp_path / "out")["lm_head"].difference(plain["lm_head"]) is None


def test_tuning_that_makes_things_worse_is_undone(tmp_path: Path, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    plain = untuned(source, tmp_path / "plain", rounded)
    # Steps as large as the scales themselves.
    result = quantize(source, tmp_path / "out", recipe=rounded.replace(tune_rate=0.9), device="cpu")
    report = result.tuning
    assert report is not None
    assert (report["kept_step"], report["kl_after"]) == (0, report["kl_before"])
    assert list(report["vectors"]) == []
    assert f"got no better than {report['kl_before']:.4f}, so tuning is undone" in result.render()
    after = weights(tmp_path / "out")
    assert all(plain[name].difference(after[name]) is None for name in plain)


@pytest.mark.parametrize(
    ("looks", "kept_step", "astray"),
    [
        ((1.0, 0.5, 0.9), 2, False),  # worse than in between, better than before
        ((1.0, 0.5, 1.0), 1, False),
        ((1.0, 1.2, 0.9), 2, False),
        ((1.0, 1.2, 1.1), 0, False),
        ((1.0, 3.9, 0.5), 2, False),
        ((1.0, 0.5, 4.1), 1, False),  # there was nothing left to stop
        ((1.0, 4.1, 0.5), 0, True),  # there is no third look
    ],
)
def test_the_last_values_are_kept_where_they_help(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rounded: Recipe,
    looks: tuple[float, ...],
    kept_step: int,
    astray: bool,
) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    found = iter(looks)
    monkeypatch.setattr(loop.Loop, "_look", lambda self: next(found))
    recipe = rounded.replace(samples=8, tune_steps=2)
    result = quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    report = result.tuning
    assert report is not None
    assert report["kept_step"] == kept_step
    assert report["kl_after"] == looks[kept_step]
    assert report["astray"] == (looks[1] if astray else None)
    assert (report["steps"] == 1) == astray
    assert ("stopped at a mean KL of 4.1000; a lower --tune-rate may help" in result.render()) == astray


def test_text_worse_than_before_tuning_halves_the_rates_from_the_best_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe
) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    # The fourth step's is 1.22 times the least, but below 1.15 times the first: it falls by itself.
    looks = iter((1.0, 1.1, 1.2, 0.9, 1.1, 1.16, 1.0))
    rates: list[float] = []
    moved: list[bool] = []
    step = loop.Loop._step

    def noted(self: loop.Loop) -> float:
        best = [torch.equal(self._best[name].to(leaf.dtype), leaf) for name, leaf in self._leaves.items()]
        moved.append(not all(best))
        learnt = step(self)
        rates.append(self._optimizer.param_groups[0]["lr"])
        return learnt

    monkeypatch.setattr(loop.Loop, "_look", lambda self: next(looks))
    monkeypatch.setattr(loop.Loop, "_step", noted)
    monkeypatch.setattr(loop, "_WARMUP", 2)
    recipe = rounded.replace(samples=8, tune_steps=6)
    result = quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    report = result.tuning
    assert report is not None
    assert (report["halvings"], report["kept_step"], report["astray"]) == (2, 3, None)
    assert "the rates halved 2 times, since held-out text got worse" in result.render()
    # Steps 3 and 6 begin at the best values. Step 4 does, too, since the third step's are the best.
    assert moved == [False, True, False, False, True, False]
    fallen = [0.5 * (1 + math.cos(math.pi * number / 6)) for number in range(6)]
    shares = [1 / 2, 1, 1 / 4, 1 / 2, 1 / 2, 1 / 8]
    expected = [recipe.tune_rate * share * part for share, part in zip(shares, fallen, strict=True)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("samples", [7, 64])
def test_lines_say_how_tuning_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe, samples: int
) -> None:
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    learnt: list[tuple[float, int]] = []
    seconds = iter(range(0, 10_000, 6))
    said: list[str] = []
    divergence = loop.divergence

    def noted(*args: Any, **kwargs: Any) -> Any:
        total, rows = divergence(*args, **kwargs)
        if rows is not None:
            learnt.append((total, len(rows)))
        return total, rows

    monkeypatch.setattr(loop, "divergence", noted)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    recipe = rounded.replace(samples=samples, tune_steps=12)
    result = quantize(source, tmp_path / "out", recipe=recipe, device="cpu", message=said.append)
    assert result.tuning is not None
    said = [line for line in said if line.startswith("tuning")]
    # The first step, then one every 15 s, which 6 s a step make every third; none at the end.
    assert [line.split(":")[0] for line in said] == [f"tuning, step {step} of 12" for step in (1, 4, 7, 10)]
    assert [line.split("; ")[1] for line in said] == ["66 s left", "48 s left", "30 s left", "12 s left"]
    each = len(learnt) // 12
    for line, (start, stop) in zip(said, pairwise((0, 1, 4, 7, 10)), strict=True):
        part = learnt[each * start : each * stop]
        mean = sum(total for total, _ in part) / sum(tokens for _, tokens in part)
        assert f": mean KL {mean:.4f} on the text that is learnt" in line
    before = result.tuning["kl_before"]
    told = "" if before is None else f" on held-out text ({before:.4f} before)"
    assert all(line.split("; ")[0].endswith(told or "learnt") for line in said)


def test_qualities_are_settings_by_name(tmp_path: Path) -> None:
    best = Recipe().replace(quality="best", tune_steps=7)
    assert (best.tune_steps, best.tune_codes) == (7, True)
    assert best.quality_record() == {"name": "best", "version": 20, "changed": ["tune_steps"]}
    assert Recipe.from_dict(best.to_dict()) == best
    assert best.replace(quality="fast") == Recipe().replace(quality="fast")
    source = save_tiny("llama", tmp_path / "model")
    small = {"samples": 8, "max_length": 40, "group_size": 32}
    quantize(source, tmp_path / "out", recipe=Recipe.from_dict({"quality": "fast", **small}), device="cpu")
    manifest = json.loads((tmp_path / "out" / "marlinq.json").read_text())
    assert manifest["quality"] == {"name": "fast", "version": 4, "changed": []}
    assert manifest["recipe"]["method"] == "imatrix"


@pytest.mark.parametrize(
    ("scheme", "moves"), [("nvfp4", True), pytest.param("mxfp4", False, marks=pytest.mark.slow)]
)
def test_scales_of_floats_are_tuned_where_they_can_move(
    tmp_path: Path, rounded: Recipe, scheme: str, moves: bool
) -> None:
    """Codes of floats stay, also where those of integers would follow."""
    source = save_tiny("llama", tmp_path / "model", blocks=1)
    floats = {"scheme": scheme, "group_size": "auto", "format": "compressed-tensors"}
    few = {"samples": 7, "tune_rate": 0.05, "tune_steps": 4, "tune_codes": True}
    plain = untuned(source, tmp_path / "plain", rounded, **floats, **few)
    report = tuned(source, tmp_path / "tuned", rounded, **floats, **few)
    assert report["changed_codes"] == 0
    after = weights(tmp_path / "tuned")
    assert all(torch.equal(after[name].codes, plain[name].codes) for name in plain)
    changed = [not torch.equal(after[name].scales.float(), plain[name].scales.float()) for name in plain]
    assert any(changed) == moves
    assert marlinq.verify(tmp_path / "tuned", against=source, device="cpu", progress=False).ok
