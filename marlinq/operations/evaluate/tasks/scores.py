"""Scores on tasks, and recovery: a quantised model's score in per cent of the original's.

Both models answer the same documents, so the standard error of the ratio comes from pairs of scores. With a
the model's and b the original's score of a document, R = mean(a) / mean(b), and by the delta method

    standard error of R = standard error of mean(a - R b) / mean(b).

This is far below the error for two independent samples, because both models answer most documents alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NEAR = 1e-6
"""Tolerance, relative and absolute, between a reported score and the mean of its documents' scores."""
_MAIN = ("acc_norm", "exact_match", "acc")
"""Metrics that stand for a task in the mean over tasks, the first that the task has."""


@dataclass(frozen=True)
class Ratio:
    """A ratio in per cent.

    Attributes:
        percent: the ratio; 100 is as good as the original.
        stderr: standard error of ``percent``, in per cent; None where it is not known.
    """

    percent: float
    stderr: float | None

    def describe(self) -> str:
        """Text such as ``98.7 % ± 0.4``."""
        return f"{self.percent:.1f} %" + ("" if self.stderr is None else f" ± {self.stderr:.1f}")


@dataclass(frozen=True)
class TaskScore:
    """One metric of one task or group of tasks.

    Attributes:
        task: name of the task in the harness.
        metric: name of the metric and of the harness's answer filter, such as ``acc,none``.
        documents: number of documents answered.
        value: the model's score.
        stderr: standard error of ``value``, from the harness.
        against_value, against_stderr: the original's score and its standard error.
        recovery: the model's score in per cent of the original's; the inverse ratio where lower is better.
        higher_is_better: whether a higher score is better.
        main: whether this metric stands for the task in the mean over tasks.
    """

    task: str
    metric: str
    documents: int
    value: float
    stderr: float | None
    against_value: float | None
    against_stderr: float | None
    recovery: Ratio | None
    higher_is_better: bool
    main: bool


def read_scores(own: Mapping[str, Any], original: Mapping[str, Any] | None) -> tuple[TaskScore, ...]:
    """Scores from the harness's results for a model (``found``) and for the original.

    A group of tasks with a score of its own replaces its tasks.
    """
    results = own["results"]
    groups: Mapping[str, Sequence[str]] = {
        name: members for name, members in (own.get("group_subtasks") or {}).items() if members
    }
    scored = {name for name in groups if _metrics(results.get(name, {}))}
    inside = {member for name in scored for member in groups[name]}
    scores: list[TaskScore] = []
    for task in (*results, *(name for name in groups if name not in results)):
        if task in inside or not (metrics := _metrics(results.get(task, {}))):
            continue
        main = _main(metrics)
        scores += [_score(task, metric, metric == main, own, original) for metric in metrics]
    return tuple(scores)


def mean_recovery(scores: Iterable[TaskScore]) -> Ratio | None:
    """Mean over tasks of their main metric's recovery; None for fewer than two tasks.

    Its standard error takes tasks for independent.
    """
    ratios = [score.recovery for score in scores if score.main and score.recovery is not None]
    if len(ratios) < 2:
        return None
    errors = [ratio.stderr for ratio in ratios]
    stderr = None
    if all(error is not None for error in errors):
        stderr = math.sqrt(sum(error * error for error in errors if error is not None)) / len(ratios)
    return Ratio(sum(ratio.percent for ratio in ratios) / len(ratios), stderr)


def paired(model: Sequence[float], original: Sequence[float]) -> Ratio | None:
    """Recovery from two models' scores of the same documents; None where the original's mean is 0."""
    n = len(original)
    if n == 0 or len(model) != n or not (below := sum(original) / n):
        return None
    ratio = sum(model) / n / below
    left = [a - ratio * b for a, b in zip(model, original, strict=True)]
    stderr = None
    if n > 1:
        variance = sum(value * value for value in left) / (n - 1)  # the mean of ``left`` is 0
        stderr = 100 * math.sqrt(variance / n) / abs(below)
    return Ratio(100 * ratio, stderr)


def _score(
    task: str, metric: str, main: bool, results: Mapping[str, Any], original: Mapping[str, Any] | None
) -> TaskScore:
    row = results["results"][task]
    better = _higher_is_better(results, task, metric.partition(",")[0])
    value, mine = float(row[metric]), _samples(results, task, metric)
    against = against_stderr = recovery = None
    if original is not None:
        other = original["results"][task]
        against, against_stderr = float(other[metric]), _stderr(other, metric)
        theirs = _samples(original, task, metric)
        over, under = (value, against) if better else (against, value)
        if under:
            recovery = Ratio(100 * over / under, None)
        if _is_mean(value, mine) and _is_mean(against, theirs) and list(mine) == list(theirs):
            pair = list(mine.values()), list(theirs.values())
            recovery = paired(*(pair if better else pair[::-1]))
    documents = len(mine) or int(row.get("sample_len") or 0)
    return TaskScore(
        task, metric, documents, value, _stderr(row, metric), against, against_stderr, recovery, better, main
    )


def _metrics(row: Mapping[str, Any]) -> list[str]:
    """Names of the scores in a row of results, such as ``acc,none``."""
    return [
        key
        for key, value in row.items()
        if "," in key
        and "_stderr," not in key
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
    ]


def _main(metrics: Sequence[str]) -> str:
    for name in _MAIN:
        for metric in metrics:
            if metric.partition(",")[0] == name:
                return metric
    return metrics[0]


def _stderr(row: Mapping[str, Any], metric: str) -> float | None:
    name, _, kept = metric.partition(",")
    value = row.get(f"{name}_stderr,{kept}")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _higher_is_better(results: Mapping[str, Any], task: str, metric: str) -> bool:
    known = (results.get("higher_is_better") or {}).get(task) or {}
    return known.get(metric) is not False


def _samples(results: Mapping[str, Any], task: str, metric: str) -> dict[tuple[str, int], float]:
    """Scores by (task, document) of a task, or of all tasks of a group; empty where a score is no number."""
    name, _, kept = metric.partition(",")
    members = (results.get("group_subtasks") or {}).get(task) or [task]
    values: dict[tuple[str, int], float] = {}
    for member in members:
        for sample in (results.get("samples") or {}).get(member) or ():
            if sample.get("filter", kept) != kept:
                continue
            value = sample.get(name)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                return {}
            values[member, int(sample["doc_id"])] = float(value)
    return dict(sorted(values.items()))


def _is_mean(value: float, samples: Mapping[Any, float]) -> bool:
    """Whether a score is the mean of its documents' scores."""
    return bool(samples) and math.isclose(
        sum(samples.values()) / len(samples), value, rel_tol=_NEAR, abs_tol=_NEAR
    )
