"""Perplexity of one model; mean KL divergence and top-1 agreement between two; scores on tasks.

At every position but the last of each window, let p be the original's and q the model's distribution over
the next token x. Then

    perplexity = exp(mean of -log q(x))        KL = mean of sum_v p(v) (log p(v) - log q(v))

in nats. Logarithms are float32, means float64.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.calibration.tokens import moved_tokens, same_tokenizer_files
from marlinq.core import boundaries
from marlinq.core.display import Block, Facts, Shown, Table, counted, lines
from marlinq.core.errors import CheckpointError, NumericsError, OutputError, UsageError
from marlinq.core.model_source import local_folder
from marlinq.core.progress import Progress, ReportProgress, no_progress, shows_progress
from marlinq.operations.evaluate.tasks import (
    Ratio,
    TaskOptions,
    TaskScore,
    check_tasks,
    mean_recovery,
    run_tasks,
)
from marlinq.operations.evaluate.windows import EvaluationText, read_windows, write_windows
from marlinq.operations.little_memory import tells_of_little_memory
from marlinq.operations.report import check_keepable, keep_evaluation
from marlinq.runtime import LoadedModel, load
from marlinq.runtime.generation import device_name, position_limit
from marlinq.runtime.step.forward_choice import check_head

Source = str | os.PathLike[str] | LoadedModel
"""A checkpoint folder, a Hub id, or a loaded model."""

DEFAULT_SEED = 20_240_229
"""Seed for text that a model writes. It differs from calibration's default seed, so that no model is
evaluated on the text it was calibrated with."""

_ROWS = 128
"""positions whose float32 distributions are in memory at once"""


@dataclass(frozen=True)
class Evaluation(Shown):
    """The figures of one evaluation.

    Attributes:
        model: path of the checkpoint.
        against: path of the original; None without one, as are the figures that need it.
        text: source of the text.
        windows: number of evaluated windows.
        tokens: number of predicted tokens in all windows.
        perplexity: perplexity of the model.
        against_perplexity: perplexity of the original.
        kl: mean KL(original || model) in nats.
        top1_agreement: share of positions (0 to 1) where both predict the same next token.
        seconds: seconds for the evaluation, without loading.
        device: name of the device.
        notes: sentences on how the models were run.
        tasks: scores on tasks; empty where none were asked for.
        recovery: mean over tasks of the model's score in per cent of the original's.
        kept: one line for each file that the figures were written to.
    """

    model: str
    against: str | None
    text: str
    windows: int
    tokens: int
    perplexity: float
    against_perplexity: float | None
    kl: float | None
    top1_agreement: float | None
    seconds: float
    device: str
    notes: tuple[str, ...]
    tasks: tuple[TaskScore, ...] = ()
    recovery: Ratio | None = None
    kept: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def display(self) -> list[Block]:
        """The figures, each with its meaning."""
        perplexity = "how many tokens the model hesitates between, on average; lower is better"
        header: tuple[str, ...] = ("", "model", "meaning")
        rows: list[tuple[str, ...]] = [("perplexity", f"{self.perplexity:.4f}", perplexity)]
        facts = [("model", self.model)]
        if self.against_perplexity is not None and self.kl is not None and self.top1_agreement is not None:
            header = ("", "original", "model", "meaning")
            agreed = f"{100 * self.top1_agreement:.2f} %"
            rows = [
                ("perplexity", f"{self.against_perplexity:.4f}", f"{self.perplexity:.4f}", perplexity),
                (
                    "mean KL",
                    "0",
                    f"{self.kl:.6f}",
                    "distance of the predictions, in nats; 0 is the same",
                ),
                ("top-1 agreement", "100 %", agreed, "positions where both predict the same next token"),
            ]
            facts.append(("original", str(self.against)))
        facts += [
            ("text", self.text),
            ("", f"{counted(self.windows, 'windows')}, {self.tokens} predicted tokens"),
            ("time", f"{self.seconds:.1f} s on {self.device}"),
        ]
        numbers = tuple(range(1, len(header) - 1))
        facts += [("note", line) for line in self.kept]
        return [
            Table(header, tuple(rows), numbers=numbers),
            *_task_table(self.tasks, self.recovery),
            Facts(tuple(facts)),
        ]

    def explain(self) -> list[Block]:
        """The notes: which operator multiplies the weights, and why."""
        return [lines(*self.notes)]


def _task_table(tasks: Sequence[TaskScore], mean: Ratio | None) -> list[Block]:
    if not tasks:
        return []
    rows = [
        (
            score.task,
            score.metric,
            str(score.documents),
            _score(score.value, score.stderr),
            "" if score.against_value is None else _score(score.against_value, score.against_stderr),
            "" if score.recovery is None else score.recovery.describe(),
        )
        for score in tasks
    ]
    if mean is not None:
        rows.append(("mean", "", "", "", "", mean.describe()))
    header = ("task", "metric", "documents", "model", "original", "recovery")
    return [Table(header, tuple(rows), numbers=(2, 3, 4, 5))]


def _score(value: float, stderr: float | None) -> str:
    return f"{value:.4f}" + ("" if stderr is None else f" ± {stderr:.4f}")


@dataclass
class _Sums:
    """Sums over predicted tokens, float64."""

    tokens: int = 0
    nll: float = 0.0
    against_nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    windows: int = 0

    def add(self, logits: Tensor, original: Tensor | None, targets: Tensor) -> None:
        """Adds positions.

        Args:
            logits, original: [positions, vocabulary], the model's and the original's.
            targets: int64 [positions], the tokens that follow.
        """
        for start in range(0, len(targets), _ROWS):
            rows = slice(start, start + _ROWS)
            log_q = F.log_softmax(logits[rows].float(), dim=-1)
            chosen = targets[rows, None]
            self.tokens += len(chosen)
            self.nll -= float(log_q.gather(-1, chosen).double().sum())
            if original is None:
                continue
            log_p = F.log_softmax(original[rows].float(), dim=-1)
            self.against_nll -= float(log_p.gather(-1, chosen).double().sum())
            divergence = F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
            self.kl += float(divergence.double().sum())
            self.agreed += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())


@shows_progress
@tells_of_little_memory("choose another device or shorter windows")
def evaluate(
    model: Source,
    *,
    against: Source | None = None,
    text: str | None = None,
    windows: int = 32,
    length: int = 1024,
    revision: str | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    seed: int = DEFAULT_SEED,
    trust_remote_code: bool = False,
    tasks: TaskOptions | None = None,
    keep: bool = False,
    progress: Progress = True,
) -> Evaluation:
    """Measures ``model`` on non-overlapping windows of text, and its distance to ``against``.

    Both models are in memory at once, and the logits of one window.

    Args:
        model: quantised or unquantised checkpoint.
        against: the original; KL divergence and top-1 agreement are measured only with one.
        text: a file or dataset (:func:`marlinq.operations.evaluate.windows.read_windows`); None
            evaluates on text that the original samples, or the model itself without an original.
        windows: largest number of windows.
        length: tokens per window.
        revision: branch, tag or commit of ``model``, where that is a Hub id; its main branch when None.
        device: as in :func:`marlinq.runtime.load`.
        dtype: as in :func:`marlinq.runtime.load`, for both models.
        seed: seed of the sampled text; unused with ``text``.
        trust_remote_code: run model code that a checkpoint brings.
        tasks: tasks of lm-evaluation-harness that both models answer after the text is evaluated.
        keep: write the figures into the model's folder and its model card.
        progress: True shows progress on stderr, False shows none; a function is called with (activity, steps
            done, steps in all).

    Raises:
        UsageError: the text can't be read or is too short, the two models' vocabularies differ, or a
            revision is given for a model that is loaded already.
        CheckpointError: a checkpoint can't be loaded, or has no tokenizer for the text.
        UnsupportedError: a model has no output head.
        NumericsError: a model's logits are NaN or infinite.
        EnvironmentProblem: there are tasks, and lm-evaluation-harness is not installed or stops.
        OutputError: the figures are to be kept, and the folder can't be written.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    if windows < 1 or length < 2:
        raise UsageError(
            f"windows, length: expected 1 window of 2 tokens or more, found {windows} of {length}"
        )

    if keep:
        check_keepable(model.path if isinstance(model, LoadedModel) else _own_folder(model))
    checked_tasks = None if tasks is None else check_tasks(tasks)

    def opened(source: Source, revision: str | None = None) -> LoadedModel:
        if isinstance(source, LoadedModel):
            if revision is not None:
                raise UsageError(f"revision: {source.path} is loaded already; leave it out")
            return source
        # exact: measure the error of the weights alone, without products that round activations for speed.
        return load(
            source,
            revision=revision,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            exact=True,
            progress=progress,
        )

    loaded = opened(model, revision)
    original = None if against is None else opened(against)
    _check_pair(loaded, original, length)
    evaluated = _text(loaded, original, text, windows, length, seed, progress)
    start = time.perf_counter()
    sums = _measure(loaded, original, evaluated, progress)
    seconds = time.perf_counter() - start
    nll = sums.nll / sums.tokens
    scores: tuple[TaskScore, ...] = ()
    if tasks is not None and checked_tasks is not None:
        scores = run_tasks(checked_tasks, tasks, loaded, original, progress)
    notes = loaded.report() if original is None else [*loaded.report(), *original.report()]
    evaluation = Evaluation(
        model=str(loaded.path),
        against=None if original is None else str(original.path),
        text=evaluated.source,
        windows=sums.windows,
        tokens=sums.tokens,
        perplexity=_exponential(nll),
        against_perplexity=None if original is None else _exponential(sums.against_nll / sums.tokens),
        kl=None if original is None else sums.kl / sums.tokens,
        top1_agreement=None if original is None else sums.agreed / sums.tokens,
        seconds=seconds,
        device=device_name(loaded.device),
        notes=tuple(dict.fromkeys(notes)),
        tasks=scores,
        recovery=mean_recovery(scores),
    )
    if keep:
        plain = {key: value for key, value in evaluation.to_dict().items() if key != "kept"}
        try:
            evaluation = replace(evaluation, kept=tuple(keep_evaluation(loaded.path, plain)))
        except OutputError as error:
            # What took long to measure is reported all the same.
            warnings.warn(f"the figures were not kept: {error}", stacklevel=3)
    return evaluation


def _own_folder(model: str | os.PathLike[str]) -> Path:
    folder = local_folder(model)
    if folder is None:
        raise UsageError(f"--keep: {os.fspath(model)} is no local folder; leave it out")
    return folder


def divergence(loaded: LoadedModel, original: LoadedModel, text: EvaluationText) -> float:
    """Mean KL(original || loaded) in nats over the windows of ``text``.

    Raises:
        UsageError: there is nothing to predict.
        NumericsError: a model's logits are NaN or infinite.
    """
    sums = _measure(loaded, original, text, no_progress)
    return sums.kl / sums.tokens


def _check_pair(loaded: LoadedModel, original: LoadedModel | None, length: int) -> None:
    for each in (loaded, original):
        if each is not None:
            check_head(each)
        limit = None if each is None else position_limit(each.model)
        if each is not None and limit is not None and length > limit:
            raise UsageError(f"length: {length} tokens, but {each.path} has positions for {limit}; lower it")
    if original is None:
        return
    sizes = [each.model.config.get_text_config().vocab_size for each in (loaded, original)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{loaded.path} has a vocabulary of {sizes[0]}, {original.path} one of {sizes[1]}; "
            "only models with the same tokens can be compared"
        )
    if loaded.tokenizer is None or original.tokenizer is None:
        return
    if not same_tokenizer_files(loaded.path, original.path):
        moved = moved_tokens(loaded.tokenizer, original.tokenizer)
        if moved is not None:
            raise UsageError(f"{loaded.path}: {moved}; only models with the same tokens can be compared")


def _text(
    loaded: LoadedModel,
    original: LoadedModel | None,
    text: str | None,
    windows: int,
    length: int,
    seed: int,
    progress: ReportProgress,
) -> EvaluationText:
    if text is None:
        return write_windows(original or loaded, windows=windows, length=length, seed=seed, progress=progress)
    tokenizer = loaded.tokenizer if original is None else original.tokenizer or loaded.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{loaded.path}: no tokenizer for the text; add its files, or leave out --text")
    vocabulary = loaded.model.config.get_text_config().vocab_size
    return read_windows(text, tokenizer, windows=windows, length=length, vocabulary=vocabulary)


def _measure(
    loaded: LoadedModel,
    original: LoadedModel | None,
    text: EvaluationText,
    progress: ReportProgress,
) -> _Sums:
    sums = _Sums()
    for index, window in enumerate(text.windows):
        if len(window) > 1:
            ids = torch.tensor(window, dtype=torch.int64)
            logits = _logits(loaded, ids)
            reference = None if original is None else _logits(original, ids).to(loaded.device)
            sums.add(logits, reference, ids[1:].to(loaded.device))
            sums.windows += 1
        if not math.isfinite(sums.nll + sums.against_nll + sums.kl):
            raise NumericsError(
                f"window {index}: logits are NaN or infinite; check the weights, or run in another dtype"
            )
        progress("evaluating", index + 1, len(text.windows))
    if sums.tokens == 0:
        raise UsageError(f"text {text.source}: nothing to predict; raise --length")
    return sums


@torch.no_grad()
def _logits(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """Logits of the next token after each token but the last, [positions - 1, vocabulary]."""
    with boundaries.forward(loaded.path):
        output = loaded.model(input_ids=ids[None].to(loaded.device), use_cache=False)
        logits: Tensor = output.logits[0, :-1]
    return logits


def _exponential(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf
