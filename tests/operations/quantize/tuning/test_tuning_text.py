"""Tuning: the text that is learnt from, held out, written by the model and varied."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from marlinq.calibration import Batch, Document, make_batches
from marlinq.core.errors import OutputError
from marlinq.operations.quantize import (
    calibration_text,
    gather_text,
    own_text,
    plan_quantize,
    quantize,
    solve,
)
from marlinq.operations.quantize.planned_text import tokens_drawn_anew
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.tuning import teacher, tuning_run
from marlinq.operations.quantize.tuning.text_rows import (
    NOISE,
    REDRAWN,
    hold_out,
    new_rows,
    random_rows,
    redraw,
)
from marlinq.runtime import LoadedModel
from marlinq.runtime.writing import STAGE
from tests.operations.quantize.tuning.runs import TUNED, dies, nine_documents, tuned
from tests.testing.interrupted import Killed
from tests.testing.original_folders import folder_bytes, save_tiny
from tests.testing.tiny_models import tiny_model


def test_own_text_is_learnt_from_beside_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlinq.operations.quantize.planned_text._CALIBRATED_WITH", 1000)
    monkeypatch.setattr("marlinq.operations.quantize.budget._MOST_TOKENS", 8192)
    source = save_tiny("llama", tmp_path / "model")
    text = nine_documents(tmp_path / "text.jsonl")
    recipe = TUNED.replace(calibration=str(text), samples=9, tune_steps=2)
    plain = quantize(source, tmp_path / "plain", recipe=recipe.replace(tune_steps=0), device="cpu")
    said: list[str] = []
    own = recipe.replace(tune_own_text=True)
    with pytest.MonkeyPatch.context() as patch:
        # The original's predictions are what tuning begins with.
        patch.setattr(tuning_run, "learn", dies)
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
    assert sum("the model also writes text to be tuned on" in line for line in said) == 1
    assert f"{written['tokens']} tokens it wrote itself" in report.render()
    plan = plan_quantize(source, tmp_path / "planned", recipe=own, device="cpu")
    assert "tokens that the model writes itself" in (plan.tuning_text or "")
    assert plan.estimate.writing_seconds > 0
    assert "tuned on" in plan.render()
    # Tokens of nine documents of at most 40, and of written text.
    assert plan.tokens == 1000
    assert "the first 640 to calibrate on" in (plan.calibration or "")
    # Text that the model writes anyway is not written twice.
    alone = own.replace(calibration="self")
    assert plan_quantize(source, tmp_path / "planned", recipe=alone, device="cpu").tuning_text == "the same"


def test_the_plan_says_that_own_text_may_be_left_out(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    text = nine_documents(tmp_path / "text.jsonl")
    recipe = TUNED.replace(calibration=str(text), samples=9, tune_steps="auto", tune_own_text=True)

    def planned(recipe: Recipe) -> str:
        return plan_quantize(source, tmp_path / "out", recipe=recipe, device="cpu").tuning_text or ""

    clause = "; left out if the model is much surer of it than of the calibration text"
    # A small model takes as many steps as the budget has at most.
    assert planned(recipe).endswith(f"{clause}; tuning then takes 2800 steps instead of 1400")
    assert planned(recipe.replace(tune_steps=7)).endswith(clause)
    # Text that round-to-nearest does not read is tuned on all the same.
    rounded = recipe.replace(method="rtn")
    assert planned(rounded).startswith(f"360 tokens of {text} and ")
    assert planned(rounded).count("the model writes itself") == 1
    plan = plan_quantize(source, tmp_path / "out", recipe=rounded.replace(calibration="self"), device="cpu")
    assert (plan.calibration, plan.estimate.writing_seconds > 0) == (None, True)
    assert plan.tuning_text == "360 tokens that the model writes itself (as asked for)"
    # Conversations are not compared.
    assert "left out" not in planned(recipe.replace(tune_steps=7, chat_template="model"))


def test_own_text_of_another_kind_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlinq.operations.quantize.planned_text._CALIBRATED_WITH", 1000)
    monkeypatch.setattr("marlinq.operations.quantize.budget._MOST_TOKENS", 8192)
    source = save_tiny("llama", tmp_path / "model")
    text = nine_documents(tmp_path / "text.jsonl")
    recipe = TUNED.replace(calibration=str(text), samples=9, tune_steps="auto", tune_tokens=256)
    monkeypatch.setattr("marlinq.operations.quantize.budget._TUNE_STEPS", 1)
    monkeypatch.setattr("marlinq.operations.quantize.budget._TUNE_STEPS_OF_DOCUMENTS", 3)
    alone = quantize(source, tmp_path / "alone", recipe=recipe, device="cpu")
    own = recipe.replace(tune_own_text=True)
    steps: list[tuple[int, int]] = []
    said: list[str] = []

    def noting(stage: str, done: int, total: int) -> None:
        if stage == STAGE:
            steps.append((done, total))

    with monkeypatch.context() as patched:
        patched.setattr(own_text, "_COMPARED_TOKENS", 360)
        used = quantize(
            source, tmp_path / "used", recipe=own, device="cpu", progress=noting, message=said.append
        )
    assert not any("slower than expected" in line or "text alone" in line for line in said)
    # Written in two parts, shown as one.
    assert steps == sorted(steps)
    assert len({total for _, total in steps}) == 1
    assert [done == total for done, total in steps].count(True) == 1
    # A random model's predictions have the same entropy in its own text and in random tokens: a ratio of 1.
    monkeypatch.setattr(own_text, "_LEAST_ENTROPY", 1.1)
    too_little = quantize(source, tmp_path / "too-little", recipe=own, device="cpu")
    assert too_little.calibration == used.calibration
    monkeypatch.setattr(own_text, "_COMPARED_TOKENS", 360)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning_run, "learn", dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=own, device="cpu", message=said.append)
    monkeypatch.setattr(own_text, "_LEAST_ENTROPY", 0.0)
    report = quantize(source, tmp_path / "out", recipe=own, device="cpu", resume=True, message=said.append)
    assert sum(": tuned on the calibration text alone" in line for line in said) == 1
    # The resumed run has the calibration, number of steps and tensors of the run without tune_own_text.
    assert alone.calibration is not None
    assert report.calibration == {**alone.calibration, "own_left_out": True}
    assert "text of its own was left out" in report.render()
    assert report.tuning is not None
    assert report.tuning == alone.tuning
    assert used.tuning is not None
    assert (report.tuning["steps"], used.tuning["steps"]) == (3, 1)
    assert tensors_of(tmp_path / "out") == tensors_of(tmp_path / "alone") != tensors_of(tmp_path / "used")


@pytest.mark.parametrize("template", [False, True])
def test_text_changed_since_the_model_wrote_is_not_mixed_with_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: bool
) -> None:
    monkeypatch.setattr("marlinq.operations.quantize.budget._MOST_TOKENS", 4096)
    source = save_tiny("llama", tmp_path / "model")
    changed = nine_documents(tmp_path / "text.jsonl")
    recipe = TUNED.replace(calibration=str(changed), samples=9, tune_steps=2, tune_own_text=True)
    if template:
        changed = tmp_path / "template.jinja"
        changed.write_text("{{ messages[0].content }}")
        # Conversations need a tokenizer; what matters here is the template's file.
        monkeypatch.setattr(calibration_text, "text_by_the_model", lambda *args, **options: OWN)
        recipe = recipe.replace(chat_template=str(changed))
    with monkeypatch.context() as patched:
        # The text is stored, and not yet noted.
        patched.setattr(gather_text, "hold_out", dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    before = changed.read_text()
    changed.write_text(before.replace("[", "[4, ").replace("messages", "(messages)"))
    with pytest.raises(OutputError, match=f"{changed} gives other text than the interrupted run had; rest"):
        quantize(source, tmp_path / "out", recipe=recipe, device="cpu", resume=True)
    changed.write_text(before)
    quantize(source, tmp_path / "out", recipe=recipe, device="cpu", resume=True)
    quantize(source, tmp_path / "whole", recipe=recipe, device="cpu")
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


OWN = [Document(tuple(range(start, start + 40))) for start in range(3, 40)]
"""Text that stands for the model's."""


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The files with tensors."""
    return {name: data for name, data in folder_bytes(folder).items() if name.endswith(".safetensors")}


def test_the_entropy_of_predictions_is_taken_over_all_tokens() -> None:
    model = tiny_model("llama")
    loaded = LoadedModel(Path("tiny"), model, None, torch.device("cpu"), torch.float32, {}, ())
    documents = [tuple(range(3, 30)), tuple(range(40, 50))]
    with torch.no_grad():
        model.lm_head.weight.zero_()
        assert own_text.mean_entropy(loaded, documents, 20) == pytest.approx(
            math.log(model.config.vocab_size)
        )
        # Two tokens share all of the probability.
        model.lm_head.bias = torch.nn.Parameter(torch.full((model.config.vocab_size,), -1e4))
        model.lm_head.bias[[5, 9]] = 0
        assert own_text.mean_entropy(loaded, documents, 20) == pytest.approx(math.log(2), rel=1e-5)
        model.lm_head.bias[7] = -torch.inf
        assert own_text.mean_entropy(loaded, documents, 20) == pytest.approx(math.log(2), rel=1e-5)
        probe = tiny_model("llama")
        likely = [probe(torch.tensor([each[:20]])).logits[0].log_softmax(-1) for each in documents]
        expected = torch.cat([-(each.exp() * each).sum(-1) for each in likely]).mean()
    probed = LoadedModel(Path("tiny"), probe, None, torch.device("cpu"), torch.float32, {}, ())
    assert own_text.mean_entropy(probed, documents, 20) == pytest.approx(float(expected), rel=1e-5)


def test_documents_drawn_anew_are_calibrated_on_where_no_text_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marlinq.operations.quantize.planned_text._CALIBRATED_WITH", 1000)
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
    # Drawn documents are neither learnt from again nor held out.
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
        patch.setattr(tuning_run, "learn", dies)
        with pytest.raises(Killed):
            quantize(source, tmp_path / "again", recipe=recipe, device="cpu")
        assert (tmp_path / "again.partial" / "drawn.json").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_text, "draw_calibration", dies)
        quantize(source, tmp_path / "again", recipe=recipe, device="cpu", resume=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "again")
    plan = plan_quantize(source, tmp_path / "planned", recipe=recipe, device="cpu")
    assert plan.tokens == 1000
    assert "at most 640 tokens of documents drawn anew" in (plan.calibration or "")
    # Nothing is drawn from enough documents, nor where the model writes text, nor without tuning, nor for a
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
    monkeypatch.setattr("marlinq.operations.quantize.planned_text._CALIBRATED_WITH", 1000)
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

    monkeypatch.setattr(own_text, "TOP_K", 7)
    monkeypatch.setattr(own_text, "TextWriter", writer)
    source = save_tiny("llama", tmp_path / "model")
    with pytest.raises(Seen, match=str(top_k)):
        quantize(source, tmp_path / "out", recipe=TUNED.replace(tune_steps=steps), device="cpu")


def test_rows_fill_their_micro_batches() -> None:
    documents = [Document(tuple(range(60)))] * 3
    for steps, expected in ((1, 5), (2, 6), (3, 12), (4, 18)):
        rows = random_rows(documents, 50, 300, 250 * steps, 0)
        assert [len(row) for row in rows] == [50] * expected


def test_rows_of_one_token_are_counted() -> None:
    documents = [Document((1,)), Document((1,))]
    assert new_rows(documents, 1) == 2
    assert [row.tokens for row in random_rows(documents, 1, 1024, 3, 0)] == [(1,)] * 3


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
    # A row of one token has none that could be drawn.
    assert redraw(
        ids[:, :1], hidden[:, :1], logits, share=1.0, noise=0.3, chunk=17, generator=generator
    ).equal(ids[:, :1])
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
    learn, prepare = teacher.learn, tuning_run.TuningRun

    def noted(instance: Any, replay: Any, batches: Any, **options: Any) -> Any:
        seen.append(list(batches))
        return learn(instance, replay, batches, **options)

    def divided(checkpoint: Any, blueprint: Any, plan: Any, writer: Any, *rest: Any, **options: Any) -> Any:
        given.extend(rest[:2])
        return prepare(checkpoint, blueprint, plan, writer, *rest, **options)

    def progress(stage: str, done: int, total: int) -> None:
        stages.append(stage)

    monkeypatch.setattr(teacher, "learn", noted)
    monkeypatch.setattr(tuning_run, "learn", noted)
    monkeypatch.setattr(solve, "TuningRun", divided)
    monkeypatch.setitem(tuning_run._PLACES, "cpu", 100)
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


def test_few_documents_are_all_learnt_from(tmp_path: Path, rounded: Recipe) -> None:
    source = save_tiny("llama", tmp_path / "model")
    report = tuned(source, tmp_path / "out", rounded, samples=7, tune_steps=3)
    assert (report["documents"], report["held_out"]) == (7, 0)
    assert (report["kl_before"], report["kl_after"], report["kept_step"]) == (None, None, 3)
