"""Perplexity, KL divergence and agreement against their definitions, computed by hand in float64."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from marlinq.core.errors import CheckpointError, NumericsError, OutputError, UsageError
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.evaluate import evaluate, measure
from marlinq.operations.evaluate.windows import read_windows
from marlinq.operations.report import evaluation
from marlinq.runtime import load
from tests.runtime.test_generation import wide_model
from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized, save_tokenizer
from tests.testing.schemes import scheme

TEXT = "It is a truth universally acknowledged, that a byte is a token.\n\nÄußerst schön! " * 8


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = save_plain(tmp_path / "original", wide_model())
    save_tokenizer(folder)
    return folder


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    save_quantized(tmp_path / "quantized", wide_model(), "gptq", random_quantizer())
    return tmp_path / "quantized"


def log_probabilities(model: PreTrainedModel, window: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([window])).logits[0, :-1].double()
    return logits - logits.exp().sum(-1, keepdim=True).log()


def test_figures_by_hand(original: Path, text: Path, tmp_path: Path) -> None:
    rounded = tmp_path / "rounded"
    save_quantized(
        rounded,
        wide_model(),
        "gptq",
        lambda _, weight: round_to_nearest(weight, scheme()),
    )
    # Once each: which product a weight gets is timed at every load, and another one rounds otherwise.
    loaded = [load(folder, device="cpu") for folder in (rounded, original)]
    found = evaluate(loaded[0], against=loaded[1], text=str(text), windows=3, length=120)
    assert loaded[1].tokenizer is not None
    ids = loaded[1].tokenizer(TEXT)["input_ids"]
    models = [each.model for each in loaded]
    nll = [0.0, 0.0]
    kl, agreed, count = 0.0, 0, 0
    for start in range(0, 360, 120):
        window = ids[start : start + 120]
        log_q, log_p = (log_probabilities(model, window) for model in models)
        for place, target in enumerate(window[1:]):
            nll[0] -= float(log_q[place, target])
            nll[1] -= float(log_p[place, target])
            kl += float((log_p[place].exp() * (log_p[place] - log_q[place])).sum())
            agreed += int(log_q[place].argmax() == log_p[place].argmax())
            count += 1
    assert (found.windows, found.tokens) == (3, count) == (3, 357)
    # Log-probabilities of about ten are held in float32: 1e-6 relative.
    assert found.perplexity == pytest.approx(math.exp(nll[0] / count), rel=1e-5)
    assert found.against_perplexity == pytest.approx(math.exp(nll[1] / count), rel=1e-5)
    assert found.kl == pytest.approx(kl / count, rel=1e-5)
    assert found.top1_agreement == agreed / count
    assert 0 < agreed < count


def test_a_model_has_no_divergence_from_itself(original: Path, text: Path) -> None:
    found = evaluate(original, against=original, text=str(text), windows=2, length=100, device="cpu")
    assert (found.kl, found.top1_agreement) == (0.0, 1.0)
    assert found.perplexity == found.against_perplexity
    alone = evaluate(original, text=str(text), windows=2, length=100, device="cpu")
    assert alone.perplexity == found.perplexity
    assert alone.kl is alone.against is alone.top1_agreement is None


def test_without_text_the_original_writes_it(original: Path, quantized: Path) -> None:
    stages: list[str] = []
    runs = [
        evaluate(
            quantized, against=original, windows=4, length=40, device="cpu", seed=seed,
            progress=lambda stage, done, total: stages.append(stage),
        )
        for seed in (5, 5, 6)
    ]  # fmt: skip
    assert runs[0].text == f"sampled from {original} with seed 5"
    assert runs[0].perplexity == runs[1].perplexity != runs[2].perplexity
    assert list(dict.fromkeys(stages)) == ["loading", "writing text", "evaluating"]
    assert runs[0].against_perplexity is not None
    # Text that the original wrote is likelier to it than to random codes.
    assert runs[0].against_perplexity < runs[0].perplexity
    alone = evaluate(quantized, windows=2, length=40, device="cpu")
    assert str(quantized) in alone.text


def test_reports_hold_divergence_perplexity_and_operators(
    original: Path, quantized: Path, text: Path
) -> None:
    found = evaluate(quantized, against=original, text=str(text), windows=1, length=32, device="cpu")
    assert json.loads(json.dumps(found.to_dict()))["kl"] == found.kl
    rendered = found.render()
    assert f"{found.perplexity:.4f}" in rendered
    assert "dense: torch's product with the dequantised weight" in str(found.explain())


def test_windows_follow_each_other_without_overlap(original: Path, text: Path) -> None:
    tokenizer = save_tokenizer(original)
    ids = tokenizer(TEXT)["input_ids"]
    found = read_windows(str(text), tokenizer, windows=1000, length=100, vocabulary=320)
    assert [len(window) for window in found.windows] == [100] * (len(ids) // 100)
    assert [token for window in found.windows for token in window] == ids[: len(ids) // 100 * 100]


def test_each_window_begins_as_the_tokenizer_begins_a_text(original: Path, text: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = save_tokenizer(original)
    ids = tokenizer(TEXT)["input_ids"]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    found = read_windows(str(text), tokenizer, windows=2, length=100, vocabulary=320)
    assert found.windows == ((1, *ids[:99]), (1, *ids[99:198]))


@pytest.mark.parametrize("column", ["text", "story"])
def test_tables_are_read_row_by_row(original: Path, tmp_path: Path, column: str) -> None:
    tokenizer = save_tokenizer(original)
    table = tmp_path / "rows.jsonl"
    table.write_text("\n".join(json.dumps({"id": i, column: f"row number {i}"}) for i in range(20)))
    found = read_windows(str(table), tokenizer, windows=1, length=50, vocabulary=320)
    assert tokenizer.decode(found.windows[0]).startswith("row number 0\n\nrow number 1\n\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "no such file"),
        ("prose instead of a path " * 20, None, "File name too long"),
        ("short.txt", b"too short", "9 tokens, fewer than one window of 32"),
        ("latin.txt", b"\xe4" * 99, "not UTF-8"),
        ("two.jsonl", b'{"a": "x", "b": "y"}\n', "which column"),
        ("number.jsonl", b'{"text": 3}\n', "column 'text' holds int"),
        ("broken.jsonl", b"{", "can't be read"),
        (
            "cat.jsonl",
            b'{"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.jpg"}]}]}\n',
            "row 1 holds images; leave such rows out, only text is evaluated",
        ),
    ],
)
def test_unusable_text_is_named(
    original: Path, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        evaluate(original, text=str(path), length=32, device="cpu")


def test_only_models_with_the_same_tokens_are_compared(original: Path, quantized: Path, text: Path) -> None:
    # Text was split by the original's tokenizer alone, so a wrong one beside the model looked harmless.
    save_tokenizer(quantized)
    evaluate(quantized, against=original, text=str(text), length=32, device="cpu")
    path = quantized / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    first, second = sorted(words, key=words.__getitem__)[-2:]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match="2 tokens with other numbers than the original's"):
        evaluate(quantized, against=original, text=str(text), length=32, device="cpu")


def test_models_that_cannot_be_compared(original: Path, quantized: Path, text: Path, tmp_path: Path) -> None:
    from tests.testing.tiny_models import tiny_model

    small = save_plain(tmp_path / "small", tiny_model("llama"))
    with pytest.raises(UsageError, match="vocabulary of 320.*one of 128"):
        evaluate(quantized, against=small, text=str(text), length=32, device="cpu")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        evaluate(quantized, text=str(text), length=32, device="cpu")
    with pytest.raises(UsageError, match="positions for"):
        evaluate(original, text=str(text), length=100_000, device="cpu")
    with pytest.raises(UsageError, match="expected 1 window"):
        evaluate(original, text=str(text), windows=0, device="cpu")


def test_nan_logits_are_named(original: Path, text: Path) -> None:
    loaded = load(original, device="cpu")
    loaded.model.lm_head.weight.data[7, 7] = float("nan")
    with pytest.raises(NumericsError, match="window 0"):
        evaluate(loaded, text=str(text), windows=1, length=32)


def test_figures_that_cannot_be_kept_are_reported(
    original: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(evaluation, "replace_text", full)
    with pytest.warns(UserWarning, match=r"the figures were not kept: .*evaluation\.json: No space left"):
        found = evaluate(original, text=str(text), windows=1, length=16, device="cpu", keep=True)
    assert found.perplexity > 1
    assert not found.kept


def test_a_folder_that_cannot_hold_the_figures_is_refused_first(
    original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0)
    monkeypatch.setattr(measure, "load", None)
    with pytest.raises(OutputError, match="original: no file can be made there; make the folder writable"):
        evaluate(original, device="cpu", keep=True)


def test_a_loaded_model_has_no_revision(original: Path, text: Path) -> None:
    with pytest.raises(UsageError, match=r"revision: .* is loaded already"):
        evaluate(load(original, device="cpu"), text=str(text), revision="v2")
