"""A local task through the published lm-evaluation-harness, without a network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marlinq.operations.evaluate import TaskOptions, evaluate
from tests.operations.evaluate.test_tasks import TASK
from tests.runtime.test_generation import wide_model
from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized, save_tokenizer

pytestmark = [
    pytest.mark.interop,
    # Libraries of the harness, not code of ours.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::SyntaxWarning"
    ),
]

GENERATED = """\
task: tiny_text
dataset_path: json
dataset_kwargs: {data_files: {test: docs.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["z"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def test_local_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    original = save_plain(tmp_path / "original", wide_model())
    save_tokenizer(original)
    quantized = tmp_path / "quantized"
    save_quantized(quantized, wide_model(), "gptq", random_quantizer())
    save_tokenizer(quantized)
    documents = [
        {"question": f"what is {i}?", "choices": ["a", "bb", "c"], "answer": i % 3} for i in range(12)
    ]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, documents)) + "\n")
    for name, text in (("choice", TASK), ("text", GENERATED)):
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "corpus.txt").write_text("a byte is a token. " * 8)
    names = tuple(str(tmp_path / f"{name}.yaml") for name in ("choice", "text"))
    found = evaluate(
        quantized, against=original, text=str(tmp_path / "corpus.txt"), windows=1, length=32, device="cpu",
        tasks=TaskOptions(names, limit=10),
    )  # fmt: skip
    scores = {score.task: score for score in found.tasks}
    assert set(scores) == {"tiny", "tiny_text"}
    choice = scores["tiny"]
    assert choice.documents == 10
    assert choice.against_value is not None
    assert choice.stderr is not None
    if choice.against_value:
        assert choice.recovery is not None
        assert choice.recovery.percent == pytest.approx(100 * choice.value / choice.against_value)
        assert choice.recovery.stderr is not None
    same = evaluate(
        original, against=original, text=str(tmp_path / "corpus.txt"), windows=1, length=32, device="cpu",
        tasks=TaskOptions(names[:1]),
    )  # fmt: skip
    (score,) = same.tasks
    assert score.value == score.against_value
