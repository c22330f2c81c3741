from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import marlinq
from marlinq.calibration import Batch, Document, make_batches
from marlinq.checkpoint import Checkpoint, CheckpointWriter, QuantizedCheckpoint
from marlinq.core.errors import EnvironmentProblem, OutputError, UnsupportedError
from marlinq.core.weight import QuantizedWeight
from marlinq.models import build_blueprint
from marlinq.operations.quantize import gather_text, plan_quantize, prepare, quantize, solve, text
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.quality import QUALITIES
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.text import tokens_drawn_anew
from marlinq.operations.quantize.tuning import loop, run, teacher
from marlinq.operations.quantize.tuning.rows import NOISE, REDRAWN, hold_out, new_rows, random_rows, redraw
from marlinq.operations.quantize.tuning.student import Student, backward_kept
from tests.testing.original_folders import RECIPE, folder_bytes, save_tiny
from tests.testing.pairs import in_turn, slow_but

# With this seed tuning gains most on held-out text of the toy; with others chance decides.
TUNED = RECIPE.replace(samples=64, tune_steps=12, tune_tokens=512, tune_rate=0.002, seed=1)


@pytest.fixture(autouse=True)
def same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written to be tuned on is drawn from all tokens; here all text is, so that runs compare."""
    monkeypatch.setattr(text, "TOP_K", 0)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """As :data:`TUNED`, but tuning begins at once: weights are rounded, and the text is there."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = torch.randint(3, 128, (64, 40), generator=torch.Generator().manual_seed(1)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return TUNED.replace(method="rtn", calibration=str(path), tune_steps=6, tune_tokens=256)


def tuned(source: Path, out: Path, recipe: Recipe = TUNED, **changes: Any) -> dict[str, Any]:
    """Quantises and returns the report that the manifest holds."""
    quantize(source, out, recipe=recipe.replace(**changes), device="cpu")
    report: dict[str, Any] = json.loads((out / "marlinq.json").read_text())["run"]["tuning"]
    return report


def untuned(source: Path, out: Path, recipe: Recipe = TUNED, **changes: Any) -> dict[str, QuantizedWeight]:
    """The weights that tuning begins with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "tune", lambda *args, **options: None)
        quantize(source, out, recipe=recipe.replace(**changes), device="cpu")
    return weights(out)


def begun(source: Path, *outs: Path, **changes: Any) -> Recipe:
    """Runs that have quantised all blocks and tuned nothing yet, each to be resumed; returns their recipe."""
    recipe = TUNED.replace(**changes)
    first, *others = (out.with_name(out.name + ".partial") for out in outs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "tune", _dies)
        with pytest.raises(Killed):
            quantize(source, outs[0], recipe=recipe, device="cpu")
    for other in others:
        shutil.copytree(first, other)
    return recipe


def weights(folder: Path) -> dict[str, QuantizedWeight]:
    quantized = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert quantized is not None
    return {name: quantized.load(name) for name in quantized.modules}


def kept(folder: Path) -> dict[str, torch.Tensor]:
    quantized = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert quantized is not None
    return {name: quantized.checkpoint.tensor(name) for name in quantized.passthrough}


def kl(folder: Path, source: Path) -> float:
    found = marlinq.evaluate(folder, against=source, windows=48, length=40, device="cpu", dtype="float32").kl
    assert found is not None
    return found


def test_predictions_come_closer_to_the_originals(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    plain, out = tmp_path / "plain", tmp_path / "tuned"
    recipe = begun(source, plain, out, samples=128, tune_steps=40, tune_rate=0.004)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "tune", lambda *args, **options: None)
        quantize(source, plain, recipe=recipe, device="cpu", resume=True)
    report = quantize(source, out, recipe=recipe, device="cpu", resume=True).tuning
    assert report is not None
    assert report["kl_after"] < 0.97 * report["kl_before"]
    assert (report["documents"], report["held_out"]) == (120, 8)
    assert report["steps"] <= 40
    # On text of another seed than both the learnt and the held-out text, which is the same for both folders.
    assert kl(out, source) < 0.97 * kl(plain, source)


def test_codes_stay_unless_they_are_to_follow(tmp_path: Path, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model")
    # Of so few documents none is held out, so the last values are kept, better or not.
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


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_kept_passes_are_those_that_run_blocks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe, name: str
) -> None:
    source = save_tiny(name, tmp_path / "model")
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


def nine_documents(path: Path) -> Path:
    """A file of nine documents of 40 tokens each."""
    rows = torch.randint(3, 120, (9, 40), generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def test_own_text_is_learnt_from_beside_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlinq.operations.quantize.text._CALIBRATED_WITH", 1000)
    monkeypatch.setattr("marlinq.operations.quantize.budget._MOST_TOKENS", 8192)
    source = save_tiny("llama", tmp_path / "model")
    text = nine_documents(tmp_path / "text.jsonl")
    recipe = TUNED.replace(calibration=str(text), samples=9, tune_steps=2)
    plain = quantize(source, tmp_path / "plain", recipe=recipe.replace(tune_steps=0), device="cpu")
    said: list[str] = []
    own = recipe.replace(tune_own_text=True)
    with pytest.MonkeyPatch.context() as patch:
        # The original's predictions are what tuning begins with.
        patch.setattr(run, "learn", _dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=own, device="cpu", message=said.append)
    report = quantize(source, tmp_path / "out", recipe=own, device="cpu", resume=True, message=said.append)
    assert plain.calibration is not None
    assert report.calibration is not None
    assert report.tuning is not None
    written = report.calibration["tuned"]
    # Quantised on the file and on a little of what is written; tuned on the documents of both, of which every
    # sixteenth is held out.
    file, itself = report.calibration["sources"]
    assert report.calibration["source"] == f"{text}, self"
    assert {**file, "sha256": plain.calibration["sha256"]} == dict(plain.calibration)
    assert itself["source"] == written["source"] == "self"
    # The document that makes it enough is whole.
    assert 1000 <= file["tokens"] + itself["tokens"] == report.calibration["tokens"] < 1000 + 40
    assert itself["tokens"] + written["tokens"] >= 4096
    assert report.tuning["documents"] + report.tuning["held_out"] == (
        report.calibration["documents"] + written["documents"]
    )
    # The resumed run found the text in the unfinished folder.
    assert sum("the model writes text to be tuned on, too" in line for line in said) == 1
    assert f"{written['tokens']} tokens it wrote itself" in report.render()
    plan = plan_quantize(source, tmp_path / "planned", recipe=own, device="cpu")
    assert "tokens that the model writes itself" in (plan.tuning_text or "")
    assert plan.estimate.writing_seconds > 0
    assert "tuned on" in plan.render()
    # Of nine documents of at most 40 tokens, and of what is written.
    assert plan.tokens == 1000
    assert "the first 640 to calibrate on" in (plan.calibration or "")
    # Text that the model writes anyway is not written twice.
    alone = own.replace(calibration="self")
    assert plan_quantize(source, tmp_path / "planned", recipe=alone, device="cpu").tuning_text is None


def test_documents_drawn_anew_are_calibrated_on_where_no_text_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marlinq.operations.quantize.text._CALIBRATED_WITH", 1000)
    source = save_tiny("llama", tmp_path / "model")
    text = nine_documents(tmp_path / "text.jsonl")
    recipe = TUNED.replace(calibration=str(text), samples=9, tune_steps=2)
    calibrated: list[Document] = []
    batched = solve.own_batches

    def noted(documents: list[Document], *rest: Any, **options: Any) -> list[Batch]:
        calibrated.extend(documents)
        return batched(documents, *rest, **options)

    chances: list[tuple[float, float]] = []

    def drawn(*args: Any, share: float, noise: float, **options: Any) -> torch.Tensor:
        chances.append((share, noise))
        return redraw(*args, share=share, noise=noise, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "own_batches", noted)
        patch.setattr(teacher, "redraw", drawn)
        report = quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    assert report.calibration is not None
    assert report.tuning is not None
    file, anew = report.calibration["sources"]
    assert (file["documents"], file["tokens"]) == (9, 360)
    assert (anew["source"], anew["documents"], anew["tokens"]) == ("documents drawn anew", 16, 640)
    # What is drawn is neither learnt from again nor held out.
    assert report.tuning["documents"] + report.tuning["held_out"] == 9
    assert "tuned on" not in report.render()
    # They are the rows of those that are not held out, but for tokens that are drawn, in tuning's rows alike.
    assert len(calibrated) == 8 + 16
    given = random_rows(calibrated[:8], 40, 1024, 640, TUNED.seed)
    before, after = (torch.tensor([row.tokens for row in part]) for part in (given, calibrated[8:]))
    assert torch.equal(before[:, 0], after[:, 0])
    assert not torch.equal(before, after)
    assert chances == [(REDRAWN, NOISE)] * 2
    # A run that is resumed finds them in the unfinished folder.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "learn", _dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "again", recipe=recipe, device="cpu")
        assert (tmp_path / "again.partial" / "drawn.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_text, "draw_calibration", _dies)
        quantize(source, tmp_path / "again", recipe=recipe, device="cpu", resume=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "again")
    plan = plan_quantize(source, tmp_path / "planned", recipe=recipe, device="cpu")
    assert plan.tokens == 1000
    assert "at most 640 tokens of documents drawn anew" in (plan.calibration or "")
    # Of enough documents nothing is drawn, nor where the model writes text, nor without tuning, nor for a
    # method without calibration.
    assert tokens_drawn_anew(recipe, 360) == 640
    assert tokens_drawn_anew(recipe, 1000) == 0
    for changes in (
        {"tune_own_text": True},
        {"calibration": (str(text), "self")},
        {"tune_steps": 0},
        {"method": "rtn"},
    ):
        assert tokens_drawn_anew(recipe.replace(**changes), 360) == 0


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


def _dies(*args: Any, **kwargs: Any) -> Any:
    raise Killed


def test_at_most_64_documents_are_held_out() -> None:
    for count in (8, 100, 1024, 1025, 5000):
        documents = [Document((number, 1)) for number in range(count)]
        learning, held_out = hold_out(documents)
        assert len(held_out) == {8: 1, 100: 6, 1024: 64, 1025: 60, 5000: 64}[count]
        assert sorted(learning + held_out, key=lambda d: d.tokens) == documents
    twice = [Document((number % 20, 1)) for number in range(40)]
    learning, held_out = hold_out(twice)
    assert (len(learning), len(held_out)) == (34, 6)
    assert not set(learning) & set(held_out)
    assert hold_out([twice[0]] * 9) == ([twice[0]] * 9, [])


@pytest.mark.parametrize("own", [False, True])
def test_the_quantiser_does_not_see_what_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    parts: list[list[Document]] = []
    calibrated: list[Document] = []
    divide, batched = gather_text.hold_out, solve.own_batches

    def divided(documents: list[Document]) -> tuple[list[Document], list[Document]]:
        parts.extend([documents, *divide(documents)])
        return parts[1], parts[2]

    def noted(documents: list[Document], *rest: Any, **options: Any) -> list[Batch]:
        calibrated.extend(documents)
        return batched(documents, *rest, **options)

    monkeypatch.setattr(gather_text, "hold_out", divided)
    monkeypatch.setattr(solve, "own_batches", noted)
    monkeypatch.setattr("marlinq.operations.quantize.text._CALIBRATED_WITH", 1000)
    monkeypatch.setattr("marlinq.operations.quantize.budget._MOST_TOKENS", 8192)
    ids = tmp_path / "ids.jsonl"
    rows = [{"input_ids": [(7 * row + place) % 50 for place in range(40)]} for row in range(12)]
    ids.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = tuned(
        source, tmp_path / "out", calibration=str(ids), samples=12, tune_own_text=own, tune_steps=2
    )
    text, learning, held_out = parts
    # The file's documents come first, in an order that is drawn.
    assert {each.tokens for each in text[:12]} == {tuple(row["input_ids"]) for row in rows}
    assert (len(text) > 12) == own
    assert held_out[0] == text[7]
    assert learning[:11] == text[:7] + text[8:12]
    # 480 tokens of the file, and some 520 of its own or drawn anew.
    if own:
        assert calibrated == learning[: len(calibrated)]
        assert 11 + 520 // 40 - 2 <= len(calibrated) <= 11 + 520 // 40 + 2
    else:
        assert calibrated[:11] == learning
        assert len(calibrated) == 11 + 520 // 40
    assert (report["documents"], report["held_out"]) == (len(learning), len(held_out))


@pytest.mark.parametrize(("steps", "top_k"), [(0, 7), (3, 0)])
def test_text_to_be_tuned_on_is_drawn_from_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, top_k: int
) -> None:
    class Seen(Exception):
        pass

    def writer(loaded: object, **options: Any) -> None:
        raise Seen(options["top_k"])

    monkeypatch.setattr(text, "TOP_K", 7)
    monkeypatch.setattr(text, "TextWriter", writer)
    source = save_tiny("llama", tmp_path / "model")
    with pytest.raises(Seen, match=str(top_k)):
        quantize(source, tmp_path / "out", recipe=TUNED.replace(tune_steps=steps), device="cpu")


def test_rows_fill_their_micro_batches() -> None:
    documents = [Document(tuple(range(60)))] * 3
    for steps, expected in ((1, 5), (2, 6), (3, 12), (4, 18)):
        rows = random_rows(documents, 50, 300, 250 * steps, 0)
        assert [len(row) for row in rows] == [50] * expected


def test_rows_hold_every_token_equally_often() -> None:
    # Tokens that name their document and place, so that pieces can be told.
    documents = [Document(tuple(range(1000 * i, 1000 * i + 20 * i + 5))) for i in range(1, 30)]
    tokens = sum(map(len, documents))
    count = 3 * tokens // 64
    rows = random_rows(documents, 64, 64, 64 * count, 3)
    assert [len(row) for row in rows] == [64] * count
    seen = Counter(token for row in rows for token in row.tokens)
    assert set(seen) == {token for document in documents for token in document.tokens}
    # The last of three passes lacks the tokens that fill no row.
    assert set(seen.values()) <= {2, 3}
    # Neighbours of a document stay neighbours within a piece, of 32 to 96 tokens; pieces are in random order.
    pairs = [(a, b) for row in rows for a, b in pairwise(row.tokens)]
    apart = sum(b != a + 1 for a, b in pairs)
    assert len(pairs) / 96 < apart < len(pairs) / 32
    assert rows == random_rows(documents, 64, 64, 64 * count, 3)
    assert rows != random_rows(documents, 64, 64, 64 * count, 4)


@pytest.mark.parametrize(("others", "every"), [(0, 1), (9, 2), (10, None)])
def test_rows_begin_as_documents_do(others: int, every: int | None) -> None:
    # Tokens that come once, behind a beginning that ten documents share.
    documents = [Document((7, *range(1000 * i, 1000 * i + 100))) for i in range(1, 11)]
    documents += [Document(tuple(range(1000 * i, 1000 * i + 101))) for i in range(11, 11 + others)]
    total = sum(map(len, documents))
    rows = random_rows(documents, 64, 64, 2 * total, 3)
    assert [len(row) for row in rows] == [64] * (2 * total // 64)
    new = new_rows(documents, 64)
    begun = [] if every is None else rows[::every]
    assert all(row.tokens[0] == 7 for row in begun)
    if every is None:
        # By chance alone: a piece in seventeen begins there.
        assert sum(row.tokens[0] == 7 for row in rows) < len(rows) / 4
    # Nothing comes twice in the new rows, but for what they begin with, and the next row is not all new.
    once = Counter(token for row in rows[:new] for token in row.tokens)
    own = once.pop(7) - sum(row.tokens[0] == 7 for row in rows[:new] if every is not None)
    assert own <= 10
    assert set(once.values()) == {1}
    more = sum(64 - (every is not None and number % every == 0) for number in range(new + 1))
    assert more > total >= more - 64


def test_redrawn_tokens_follow_the_models_predictions() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(64, 101, dtype=torch.int64)
    # A token behind the hidden state h is 1 or 2, the latter with probability h.
    hidden = torch.full((64, 101, 1), 0.25)

    def logits(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.full_like(rows, -1e9), (1 - rows).log(), rows.log()], 1)

    out = redraw(ids, hidden, logits, share=0.3, noise=0.0, chunk=17, generator=generator)
    assert out.shape == ids.shape
    assert not out[:, 0].any()
    anew = out[:, 1:] > 0
    # Five standard deviations of 6,400 draws, and of some 1,920.
    assert float(anew.float().mean()) == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / 6400) ** 0.5)
    twos = (out[:, 1:][anew] == 2).float().mean()
    assert float(twos) == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 1920) ** 0.5)
    # Each behind what stood before it: the last hidden state says nothing about the row.
    hidden[:, :-1] = 1e-6
    hidden[:, -1] = 1 - 1e-6
    out = redraw(ids, hidden, logits, share=1.0, noise=0.0, chunk=1000, generator=generator)
    assert out[:, 1:].eq(1).float().mean() > 0.999
    # Strays are any of the three tokens, whatever is drawn.
    out = redraw(ids, hidden, logits, share=1.0, noise=0.3, chunk=1000, generator=generator)
    assert not out[:, 0].any()
    for token in (0, 2):
        found = float(out[:, 1:].eq(token).float().mean())
        assert found == pytest.approx(0.1, abs=5 * (0.1 * 0.9 / 6400) ** 0.5)


@pytest.mark.parametrize("steps", [1, 6])
def test_text_that_was_there_before_is_varied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    text_file = tmp_path / "text.jsonl"
    documents = torch.randint(3, 120, (63, 39), generator=torch.Generator().manual_seed(0))
    documents[:, 0] = 1
    text_file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in documents.tolist()))
    seen: list[list[Batch]] = []
    given: list[list[Document]] = []
    stages: list[str] = []
    learn, prepare = teacher.learn, run.tune

    def noted(instance: Any, replay: Any, batches: Any, **options: Any) -> Any:
        seen.append(list(batches))
        return learn(instance, replay, batches, **options)

    def divided(checkpoint: Any, blueprint: Any, plan: Any, writer: Any, *rest: Any, **options: Any) -> None:
        given.extend(rest[:2])
        prepare(checkpoint, blueprint, plan, writer, *rest, **options)

    def progress(stage: str, done: int, total: int) -> None:
        stages.append(stage)

    monkeypatch.setattr(teacher, "learn", noted)
    monkeypatch.setattr(run, "learn", noted)
    monkeypatch.setattr(solve, "tune", divided)
    monkeypatch.setitem(run._PLACES, "cpu", 100)
    quantize(
        source,
        tmp_path / "out",
        recipe=TUNED.replace(calibration=str(text_file), samples=63, tune_steps=steps, method="rtn"),
        device="cpu",
        progress=progress,
    )
    learning, held_out = given
    *first, learnt = seen
    length = len(learnt[0].ids[0])
    planned = make_batches(random_rows(learning, length, 100, steps * 512, TUNED.seed), token_budget=100)
    watched = make_batches(held_out, token_budget=100)
    assert len(learnt) == len(planned) + len(watched)
    full = len(planned[0].lengths)
    new = min(full * len(planned), new_rows(learning, length))
    # One step does not see all of the text; six see it again, from the middle of a batch on.
    assert (new == full * len(planned)) == (steps == 1)
    assert (new % full == 0) == (steps == 1)
    # The original saw what was to be varied, before any of it was.
    assert len(first) == ("varying the text" in stages) == (steps > 1)
    again = planned[new // full :]
    assert all(map(_equal, first[0] if first else [], again))
    assert len(again) == (len(first[0]) if first else 0)
    assert all(map(_equal, learnt[len(planned) :], watched))
    assert [batch.lengths for batch in learnt[: len(planned)]] == [batch.lengths for batch in planned]
    rows = [
        (old, row)
        for a, b in zip(planned, learnt, strict=False)
        for old, row in zip(a.ids, b.ids, strict=True)
    ]
    assert all(torch.equal(old, row) for old, row in rows[:new])
    if not again:
        return
    changed = torch.cat([old != row for old, row in rows[new:]])
    # Predictions of a toy are nearly uniform: hardly any token is drawn that was there.
    count = len(changed)
    assert float(changed.float().mean()) == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / count) ** 0.5 + 0.02)


def _equal(a: Batch, b: Batch) -> bool:
    return a.lengths == b.lengths and torch.equal(a.ids, b.ids)


def test_a_state_is_saved_where_that_takes_little_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    monkeypatch.setattr(run, "_SAVE_SECONDS", 0.0)
    saved: list[str] = []
    keep = run.keep

    def noted(writer: CheckpointWriter, name: str, *rest: Any) -> None:
        saved.append(name)
        keep(writer, name, *rest)

    monkeypatch.setattr(run, "keep", noted)
    for rate, share, expected in (
        (math.inf, 1.0, [run.STATE] * 3 + [run.RESULT]),
        (1e-9, 1.0, [run.RESULT]),
        (math.inf, 0.0, [run.RESULT]),
    ):
        monkeypatch.setattr(run, "_SAVE_RATE", rate)
        monkeypatch.setattr(run, "_SAVE_MEMORY_SHARE", share)
        saved.clear()
        tuned(source, tmp_path / f"{rate} {share}", rounded, tune_steps=3)
        assert saved == expected


def test_norms_are_tuned_or_left_alone(tmp_path: Path, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model")
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
    source = save_tiny("llama", tmp_path / "model")
    # Of so few documents none is held out, so the last values are kept, better or not.
    changes = {"samples": 7, "tune_codes": True, "tune_steps": 2}
    tuned(source, tmp_path / "out", rounded, format=layout, symmetric=symmetric, **changes)
    marlinq.convert(tmp_path / "out", tmp_path / "other", target_format="gptq-v2")
    # The converted folder knows from its source which vectors are no copies.
    for folder in ("out", "other"):
        checked = marlinq.verify(tmp_path / folder, against=source, device="cpu")
        assert checked.ok, checked.render()
        assert "7 tuned, near the original's" in checked.render()
    here, there = weights(tmp_path / "out"), weights(tmp_path / "other")
    assert all(here[name].difference(there[name]) is None for name in here)


@pytest.mark.parametrize(
    "name", ["llama-tied", "gpt2", "opt", pytest.param("gemma3", marks=pytest.mark.slow), "bloom", "phi"]
)
def test_other_architectures(tmp_path: Path, rounded: Recipe, name: str) -> None:
    source = save_tiny(name, tmp_path / "model")
    report = tuned(source, tmp_path / "out", rounded, tune_codes=True)
    assert report["kl_after"] < report["kl_before"]


def test_a_quantised_head_stays_as_it_was(tmp_path: Path) -> None:
    source = save_tiny("llama-tied", tmp_path / "model")
    recipe = TUNED.replace(quantize_head="int4", tune_steps=6)
    plain = untuned(source, tmp_path / "plain", recipe)
    report = tuned(source, tmp_path / "out", recipe)
    assert report["kl_after"] < report["kl_before"]
    assert weights(tmp_path / "out")["lm_head"].difference(plain["lm_head"]) is None


def test_few_documents_are_all_learnt_from(tmp_path: Path, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model")
    report = tuned(source, tmp_path / "out", rounded, samples=7, tune_steps=3)
    assert (report["documents"], report["held_out"]) == (7, 0)
    assert (report["kl_before"], report["kl_after"], report["kept_step"]) == (None, None, 3)


def test_what_gets_worse_is_undone(tmp_path: Path, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model")
    plain = untuned(source, tmp_path / "plain", rounded)
    # Steps as large as the scales themselves.
    result = quantize(source, tmp_path / "out", recipe=rounded.replace(tune_rate=0.9), device="cpu")
    report = result.tuning
    assert report is not None
    assert (report["kept_step"], report["kl_after"]) == (0, report["kl_before"])
    assert list(report["vectors"]) == []
    assert f"got no better than {report['kl_before']:.4f}: all left as it was" in result.render()
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
    source = save_tiny("llama", tmp_path / "model")
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


@pytest.mark.parametrize("samples", [7, 64])
def test_lines_say_how_tuning_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe, samples: int
) -> None:
    source = save_tiny("llama", tmp_path / "model")
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


class Killed(BaseException):
    """Stands for the end of the process."""


INTERRUPTED = TUNED.replace(tune_codes=True, tune_steps=6)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and what a run that nobody interrupts makes of it, saving its state as often as it can."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source = save_tiny("llama", folder / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "TOP_K", 0)
        patch.setattr(run, "_SAVE_SECONDS", 0.0)
        patch.setattr(run, "_SAVE_RATE", math.inf)
        quantize(source, folder / "whole", recipe=INTERRUPTED, device="cpu")
    return source, folder / "whole"


@pytest.mark.parametrize(
    "moment",
    slow_but(
        ("between steps", "before the result", "between tensors", "before the end"),
        "between steps",
        "between tensors",
    ),
)
def test_an_interrupted_run_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: tuple[Path, Path], moment: str
) -> None:
    source, whole = undisturbed
    monkeypatch.setattr(run, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(run, "_SAVE_RATE", math.inf)
    recipe = INTERRUPTED
    seen: list[int] = []
    taken = loop.Loop._step

    def counted(self: loop.Loop) -> float:
        seen.append(self.now.step)
        if moment == "between steps" and len(seen) == 4:
            raise Killed
        return taken(self)

    def dies(*args: Any, **kwargs: Any) -> Any:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_step", counted)
        if moment == "before the result":
            patch.setattr(run._Run, "_outcome", dies)
        if moment == "between tensors":
            write, done = CheckpointWriter.write, []

            def few(self: CheckpointWriter, name: str, tensor: torch.Tensor) -> None:
                done.append(name)
                # The third that is written a second time, and what is under way beside it.
                if len(done) - len(set(done)) >= 3:
                    raise Killed
                write(self, name, tensor)

            patch.setattr(CheckpointWriter, "write", few)
        if moment == "before the end":
            patch.setattr(CheckpointWriter, "finish", dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    assert not (tmp_path / "out").exists()
    seen.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Loop, "_step", counted)
        moment = "undisturbed"
        quantize(source, tmp_path / "out", recipe=recipe, device="cpu", resume=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(whole)
    # Steps that were taken are not taken again.
    assert seen in ([3, 4, 5], [])


def test_a_damaged_state_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model")
    monkeypatch.setattr(run, "_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(run, "_SAVE_RATE", math.inf)

    def dies(*args: Any, **kwargs: Any) -> Any:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run._Run, "_outcome", dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=rounded.replace(tune_steps=2), device="cpu")
    state = tmp_path / "out.partial" / "tuning.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    with pytest.raises(OutputError, match=r"tuning.safetensors: is damaged; remove"):
        quantize(source, tmp_path / "out", recipe=rounded.replace(tune_steps=2), device="cpu", resume=True)


def test_a_run_of_another_version_of_its_quality_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    recipe = TUNED.replace(quality="best", tune_steps=2)

    with pytest.MonkeyPatch.context() as patch:
        # Its folder is there before anything is made for it.
        patch.setattr(gather_text, "hold_out", _dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    monkeypatch.setitem(QUALITIES, "best", replace(QUALITIES["best"], version=10**6))
    with pytest.raises(OutputError, match="belongs to a run with another recipe"):
        quantize(source, tmp_path / "out", recipe=recipe, device="cpu", resume=True)


def test_qualities_are_settings_by_name(tmp_path: Path) -> None:
    best = Recipe().replace(quality="best", tune_steps=7)
    assert (best.tune_steps, best.tune_codes) == (7, True)
    assert best.quality_record() == {"name": "best", "version": 15, "changed": ["tune_steps"]}
    assert Recipe.from_dict(best.to_dict()) == best
    assert best.replace(quality="fast") == Recipe().replace(quality="fast")
    source = save_tiny("llama", tmp_path / "model")
    small = {"samples": 8, "max_length": 40, "group_size": 32}
    quantize(source, tmp_path / "out", recipe=Recipe.from_dict({"quality": "fast", **small}), device="cpu")
    manifest = json.loads((tmp_path / "out" / "marlinq.json").read_text())
    assert manifest["quality"] == {"name": "fast", "version": 4, "changed": []}
    assert manifest["recipe"]["method"] == "imatrix"


@pytest.mark.parametrize(
    ("memory", "rate", "expected"),
    [(10**9, 0.1, 0.1), (2 * 10**6, 0.1, 0.0), (2 * 10**6, 0.0, 0.0), (10**5, 0.1, None)],
)
def test_codes_are_tuned_where_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int, rate: float, expected: float | None
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    # 110,592 weights, of which the tuning of codes would take 2.0 MB.
    plan = plan_output(checkpoint, blueprint, TUNED)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory)
    )
    settings = loop.TuningSettings(1, 1, 0.1, rate, True, 0)
    cuda = torch.device("cuda:0")
    if expected is None:
        with (
            pytest.warns(UserWarning, match="codes would take"),
            pytest.raises(EnvironmentProblem, match="keeps all"),
        ):
            run.settings_that_fit(plan, settings, cuda, 40)
        return
    with pytest.warns(UserWarning, match="they stay as they are") if rate != expected else nullcontext():
        assert run.settings_that_fit(plan, settings, cuda, 40).code_rate == expected


def test_hidden_states_leave_room_for_what_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    plan = plan_output(checkpoint, blueprint, TUNED)
    device = SimpleNamespace(total_memory=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    settings = loop.TuningSettings(1, 1, 0.1, 0.1, True, 0)
    cuda = torch.device("cuda:0")
    tuned_bytes = run.tuning_bytes(plan, settings, cuda, 40)
    assert tuned_bytes == 110_592 * 18
    for memory, expected in (
        (10**8, 12_500_000),
        (3_000_000, int((3_000_000 * 0.7 - tuned_bytes) / 2)),
        (2_500_000, 0),
    ):
        device.total_memory = memory
        assert run.bytes_for_states(plan, settings, cuda, 40) == expected
    assert run.bytes_for_states(plan, settings, torch.device("cpu"), 40) == 0
    monkeypatch.setattr(loop, "_SMALL", 0)
    assert run.bytes_for_states(plan, settings, cuda, 40) == 0


def test_gradients_count_where_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama", tmp_path / "model")
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    plan = plan_output(checkpoint, blueprint, TUNED)
    # 110,592 weights: 1.55 MB of 1.7 without gradients, 1.99 with them.
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1.7e6 / 0.7)
    )
    cuda = torch.device("cuda:0")
    # A micro-batch of 8192 places has 204 rows of 40 tokens: 8160.
    for small, tokens, expected in ((0, 8160, 0.1), (1 << 30, 8160, 0.0), (0, 8161, 0.0)):
        monkeypatch.setattr(loop, "_SMALL", small)
        settings = loop.TuningSettings(1, tokens, 0.1, 0.1, True, 0)
        with pytest.warns(UserWarning, match="they stay") if not expected else nullcontext():
            assert run.settings_that_fit(plan, settings, cuda, 40).code_rate == expected
