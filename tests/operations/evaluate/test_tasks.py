"""Tasks of lm-evaluation-harness: files that nobody trusts, recovery and its error, what is kept.

The harness itself is a stand-in here; ``tests/interop/test_harness.py`` runs the published one.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from jinja2.exceptions import SecurityError

from marlinq.core.errors import EnvironmentProblem, UsageError
from marlinq.operations.evaluate import TaskOptions, evaluate
from marlinq.operations.evaluate.tasks import harness, task_files
from marlinq.operations.evaluate.tasks.scores import mean_recovery, paired, read_scores
from marlinq.operations.report import report
from marlinq.runtime import load
from marlinq.runtime.generation import generate_batch
from tests.runtime.test_generation import wide_model
from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized, save_tokenizer

TASK = """\
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: docs.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
METRICS = frozenset({"acc", "acc_norm", "perplexity"})


def task_file(folder: Path, text: str = TASK) -> Path:
    (folder / "docs.jsonl").write_text('{"question": "q", "choices": ["a", "b"], "answer": 0}\n')
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


def evaluator() -> types.SimpleNamespace:
    """The harness's functions that run git and pip in the current folder."""

    def run_it(*_: Any) -> None:
        raise AssertionError("what lies in the current folder was run")

    return types.SimpleNamespace(get_git_commit_hash=run_it, add_env_info=run_it)


def test_a_harness_that_looks_around_in_another_way_is_refused() -> None:
    made = harness.Harness("9", None, None, None, types.SimpleNamespace(), None, None, METRICS)
    with pytest.raises(EnvironmentProblem, match="lacks get_git_commit_hash or add_env_info"):
        harness.run(made, None, ["tiny"], None, shots=None, limit=None, trusted=False)


def test_a_plain_task_names_its_documents_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("test_split: train\ndescription: from the base\n")
    read = task_files.read_task(str(task_file(tmp_path, f"include: base.yaml\n{TASK}")), METRICS)
    assert read["dataset_kwargs"]["data_files"] == {"test": str(tmp_path / "docs.jsonl")}
    assert (read["test_split"], read["description"]) == ("test", "from the base")
    assert "include" not in read


def test_documents_that_are_missing_are_told_with_the_task_file(tmp_path: Path) -> None:
    path = task_file(tmp_path, TASK.replace("docs.jsonl", "gone.jsonl"))
    with pytest.raises(UsageError, match=r"--tasks \S+tiny\.yaml: data_files: no local file 'gone\.jsonl'"):
        task_files.read_task(str(path), METRICS)


@pytest.mark.parametrize(
    ("tasks", "kind", "hint"),
    [
        ([{"task": "tiny"}], UsageError, "compare the keys of the task's YAML with its documents"),
        (["arc_easy"], EnvironmentProblem, "data sets of its tasks come from the Hub"),
    ],
)
def test_what_stops_a_task_is_said_with_what_to_mend(
    tasks: list[Any], kind: type[Exception], hint: str
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyError("foo")

    made = harness.Harness("0", stop, None, None, evaluator(), None, None, METRICS)
    with pytest.raises(kind, match=hint):
        harness.run(made, None, tasks, None, shots=None, limit=None, trusted=False)


def test_files_that_include_each_other_many_times_are_refused(tmp_path: Path) -> None:
    for level in range(6):
        (tmp_path / f"{level}.yaml").write_text(f"include: [{', '.join([f'{level + 1}.yaml'] * 8)}]\n")
    (tmp_path / "6.yaml").write_text("num_fewshot: 0\n")
    with pytest.raises(UsageError, match="more than 64 files"):
        task_files.read_task(str(task_file(tmp_path, f"include: 0.yaml\n{TASK}")), METRICS)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"{{question}}"', "!function code.text", "!function.*--trust-task-code"),
        ("task: tiny", "task: tiny\nclass: !function code.Task", "!function.*--trust-task-code"),
        ("task: tiny", "task: tiny\nclass: os.system", "'class' is none of a plain task's"),
        ("task: tiny", "task: tiny\nunsafe_code: true", "'unsafe_code'"),
        ("task: tiny", "task: tiny\nuse_prompt: other.yaml:one", "'use_prompt'"),
        ("task: tiny", "task: tiny\ninclude: inner.yaml", "inner.yaml: .*!function"),
        ("task: tiny", "task: tiny\ninclude: tiny.yaml", "include: files include each other"),
        ("task: tiny", "task: [one, two]", "expected a name under task"),
        ("metric: acc", "metric: ./metric.py", "may be code; pass --trust-task-code"),
        ("metric: acc", "metric: [acc]", "may be code; pass --trust-task-code"),
        ("test: docs.jsonl", f"test: {'x' * 5_000}", "no local file"),
        ("metric: acc", "metric: acc, hf_evaluate: true", "'hf_evaluate'"),
        ("dataset_path: json", "dataset_path: pandas", "found 'pandas'"),
        ("dataset_path: json", "dataset_path: someone/data", "found 'someone/data'"),
        ("test: docs.jsonl", "test: missing.jsonl", "no local file 'missing.jsonl'"),
        ("test: docs.jsonl", "test: 'https://host/docs.jsonl'", "no local file"),
        ("{data_files:", "{trust_remote_code: true, data_files:", "'trust_remote_code'"),
    ],
)
def test_task_files_that_may_run_code_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "inner.yaml").write_text("process_docs: !function code.docs\n")
    assert old in TASK
    path = task_file(tmp_path, TASK.replace(old, new))
    with pytest.raises(UsageError, match=message):
        task_files.read_task(str(path), METRICS)


def test_recovery_has_the_standard_error_of_paired_scores() -> None:
    rng = np.random.default_rng(0)
    theirs = (rng.random(500) < 0.6).astype(float)
    mine = np.where(rng.random(500) < 0.05, 1 - theirs, theirs)
    found = paired(mine.tolist(), theirs.tolist())
    assert found is not None
    ratio = mine.mean() / theirs.mean()
    cov = np.cov(mine, theirs)
    variance = (cov[0, 0] - 2 * ratio * cov[0, 1] + ratio**2 * cov[1, 1]) / 500 / theirs.mean() ** 2
    # The same sums in another order; the means of a and R b agree to rounding.
    assert found.percent == pytest.approx(100 * ratio, rel=1e-12)
    assert found.stderr == pytest.approx(100 * variance**0.5, rel=1e-9)
    apart = (cov[0, 0] + ratio**2 * cov[1, 1]) / 500 / theirs.mean() ** 2
    assert found.stderr < 50 * apart**0.5
    assert paired([1.0], [0.0]) is None


def answers(values: Mapping[str, list[float]], metric: str = "acc", better: bool = True) -> dict[str, Any]:
    """Result of ``simple_evaluate`` for means of documents."""
    return {
        "results": {
            task: {
                f"{metric},none": sum(each) / len(each),
                f"{metric}_stderr,none": 0.01,
                "sample_len": len(each),
            }
            for task, each in values.items()
        },
        "higher_is_better": {task: {metric: better} for task in values},
        "samples": {
            task: [{"doc_id": i, "filter": "none", metric: value} for i, value in enumerate(each)]
            for task, each in values.items()
        },
        "group_subtasks": {},
    }


def test_scores_of_tasks_and_of_groups() -> None:
    mine = answers({"one": [1, 0, 0, 1], "two": [1, 1, 0, 0]})
    theirs = answers({"one": [1, 1, 0, 1], "two": [1, 1, 1, 1]})
    one, two = read_scores(mine, theirs)
    assert (one.value, one.against_value, one.documents) == (0.5, 0.75, 4)
    assert one.recovery is not None
    assert two.recovery is not None
    assert one.recovery.percent == pytest.approx(200 / 3)
    mean = mean_recovery([one, two])
    assert mean is not None
    assert mean.percent == pytest.approx((200 / 3 + 50) / 2)
    assert one.recovery.stderr is not None
    assert two.recovery.stderr is not None
    assert mean.stderr == pytest.approx((one.recovery.stderr**2 + two.recovery.stderr**2) ** 0.5 / 2)
    for each in (mine, theirs):
        values = [sample["acc"] for task in ("one", "two") for sample in each["samples"][task]]
        each["results"]["both"] = {"acc,none": sum(values) / 8}
        each["group_subtasks"] = {"both": ["one", "two"]}
    (group,) = read_scores(mine, theirs)
    assert (group.task, group.documents) == ("both", 8)
    assert group.recovery is not None
    assert group.recovery.stderr is not None


def test_scores_that_are_not_means_have_no_paired_error() -> None:
    mine, theirs = (
        answers({"one": [4.0, 4.0]}, "perplexity", False),
        answers({"one": [2.0, 2.0]}, "perplexity", False),
    )
    (score,) = read_scores(mine, theirs)
    assert score.recovery is not None
    assert score.recovery.percent == 50  # less is better
    mine["samples"]["one"][0]["perplexity"] = 5.0  # the score is no longer the documents' mean
    (score,) = read_scores(mine, theirs)
    assert score.recovery == type(score.recovery)(50.0, None)
    assert read_scores(mine, None)[0].recovery is None


class Wrapper:
    """Stands for the harness's model wrapper."""

    def __init__(self, pretrained: Any, tokenizer: Any, batch_size: int, max_length: int) -> None:
        self.model, self.tokenizer = pretrained, types.SimpleNamespace(pad_token_id=0)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> str:
        return "the harness's own"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> harness.Harness:
    """A harness whose models answer from a table: the model's answers come first, then the original's."""
    rows: Iterator[dict[str, Any]] = iter(
        [answers({"tiny": [1, 0, 1, 1]}), answers({"tiny": [1, 1, 1, 1]})] * 2
    )

    class Manager:
        def __init__(self, include_defaults: bool) -> None:
            self.all_tasks = ["arc_easy", "arc_challenge"] if include_defaults else []

    def simple_evaluate(model: Any, tasks: list[Any], limit: int | None, **others: Any) -> dict[str, Any]:
        print("a line that must not reach stdout")
        around.add_env_info({"git_hash": around.get_git_commit_hash()})
        assert tasks[0]["task"] == "tiny"
        assert limit == 4
        assert not others["confirm_run_unsafe_code"]
        with pytest.raises(SecurityError):
            utils.env.from_string("{{ ''.__class__.__mro__ }}").render()
        return next(rows)

    utils = types.SimpleNamespace(env=jinja2.Environment(undefined=jinja2.StrictUndefined))
    utils.env.filters["regex_replace"] = str
    around = evaluator()
    made = harness.Harness("0", simple_evaluate, Manager, Wrapper, around, utils, None, METRICS)
    monkeypatch.setattr(harness, "open_harness", lambda: made)
    return made


def test_tasks_beside_the_original_are_kept_with_the_checkpoint(
    tmp_path: Path, package: harness.Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    original = save_plain(tmp_path / "original", wide_model())
    save_tokenizer(original)
    quantized = tmp_path / "quantized"
    save_quantized(quantized, wide_model(), "gptq", random_quantizer())
    save_tokenizer(quantized)
    card = quantized / "README.md"
    card.write_text("---\ntags: [marlinq]\n---\n\n`marlinq.json` lists tensors.\n\n## Use\n\nAs ever.\n")
    text = tmp_path / "text.txt"
    text.write_text("a byte is a token. " * 8)
    usual = package.utils.env
    options = TaskOptions((str(task_file(tmp_path)),), limit=4)
    for _ in range(2):  # the second run replaces what the first has kept
        found = evaluate(
            quantized, against=original, text=str(text), windows=1, length=32, device="cpu", tasks=options,
            keep=True,
        )  # fmt: skip
    assert package.utils.env is usual
    assert capsys.readouterr().out == ""
    (score,) = found.tasks
    assert score.recovery is not None
    assert score.recovery.percent == 75
    assert "75.0 % ± 25.0" in found.render()
    assert found.to_dict()["tasks"][0]["recovery"]["percent"] == 75
    kept = card.read_text()
    assert kept.count("## Evaluation") == 1
    assert kept.index("75.0 % ± 25.0") < kept.index("## Use")
    page = report(quantized, out=tmp_path / "page").files[0].read_text()
    assert "75.0 % ± 25.0" in page
    assert json.loads((quantized / "evaluation.json").read_text())["kl"] == found.kl
    (quantized / "evaluation.json").write_text('{"fingerprint": "of another checkpoint", "kl": 1}')
    assert "Evaluation" not in report(quantized, out=tmp_path / "page").files[0].read_text()


def test_greedy_text_comes_from_our_decode_step(tmp_path: Path, package: harness.Harness) -> None:
    save_plain(tmp_path, wide_model())
    save_tokenizer(tmp_path)
    loaded = load(tmp_path, device="cpu")
    model = harness.wrapped(package, loaded, 2, lambda *_: None)
    context = torch.tensor([[0, 0, 1, 9, 30], [7, 8, 9, 30, 77]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    made = model._model_generate(context, 9, ["no such text"], attention_mask=mask, do_sample=False)
    rows = generate_batch(loaded, [[1, 9, 30], [7, 8, 9, 30, 77]], max_new_tokens=4).rows
    assert made[:, :5].tolist() == context.tolist()
    assert [row[: len(each.tokens)] for row, each in zip(made[:, 5:].tolist(), rows, strict=True)] == [
        list(each.tokens) for each in rows
    ]
    sampled = model._model_generate(context, 9, [], attention_mask=mask, do_sample=True, temperature=1.0)
    assert sampled == "the harness's own"


def test_unknown_tasks_are_named_with_near_ones(package: harness.Harness) -> None:
    with pytest.raises(UsageError, match="no such task .near it: arc_easy"):
        evaluate("unused", tasks=TaskOptions(("arc_eazy",)))


def test_a_missing_harness_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(EnvironmentProblem, match=r'pip install ".\[eval\]" in a clone'):
        harness.open_harness()
