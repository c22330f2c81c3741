"""Finds tasks and runs them on the model, then on the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from marlinq.core.errors import CheckpointError, UsageError
from marlinq.core.progress import ReportProgress
from marlinq.operations.evaluate.tasks import harness, task_files
from marlinq.operations.evaluate.tasks.scores import TaskScore, read_scores
from marlinq.runtime import LoadedModel


@dataclass(frozen=True)
class TaskOptions:
    """Tasks to run, and the settings of the run.

    Attributes:
        names: tasks of lm-evaluation-harness, or YAML files in its format.
        shots: examples in front of each document; None for the task's own number.
        limit: largest number of documents per task; None for all.
        batch: requests per batch.
        trust_code: run Python that task files name, and programs that a model writes as answers.
    """

    names: tuple[str, ...]
    shots: int | None = None
    limit: int | None = None
    batch: int = 8
    trust_code: bool = False


@dataclass(frozen=True)
class Tasks:
    """Tasks that exist and may be run.

    Attributes:
        found: each task as a name the harness knows, or as a mapping read from a file.
        manager: the harness's index of tasks.
        package: the harness.
        sandboxed: whether templates must be sandboxed, because a file that isn't trusted is among the tasks.
    """

    found: tuple[str | Mapping[str, Any], ...]
    manager: Any
    package: harness.Harness
    sandboxed: bool


def check_tasks(options: TaskOptions) -> Tasks:
    """Finds the tasks that ``options`` names; no model is needed for it.

    Raises:
        EnvironmentProblem: the harness is not installed.
        UsageError: a task is unknown, a file can't be read, or a file names code and isn't trusted.
    """
    local = [name for name in options.names if task_files.is_task_file(name)]
    package = harness.open_harness()
    # Reading the harness's thousands of task files takes half a minute; local files don't need them.
    manager = package.manager(include_defaults=len(local) < len(options.names))
    checked: list[str | Mapping[str, Any]] = []
    for name in options.names:
        if not task_files.is_task_file(name):
            known = set(manager.all_tasks)
            if name not in known:
                near = _nearest(name, known)
                raise UsageError(
                    f"--tasks {name}: lm-evaluation-harness {package.version} has no such task{near}; "
                    "lm-eval ls tasks lists them"
                )
            checked.append(name)
        elif options.trust_code:
            checked.append(task_files.with_local_data(name, harness.read_trusted(package, name)))
        else:
            checked.append(task_files.read_task(name, package.metrics))
    return Tasks(tuple(checked), manager, package, bool(local) and not options.trust_code)


def _nearest(name: str, known: set[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, 3)
    return f" (near it: {', '.join(near)})" if near else ""


def run_tasks(
    tasks: Tasks,
    options: TaskOptions,
    loaded: LoadedModel,
    original: LoadedModel | None,
    progress: ReportProgress,
) -> tuple[TaskScore, ...]:
    """Scores of a model, with those of the original where there is one.

    Raises:
        CheckpointError: a model has no tokenizer.
        EnvironmentProblem: the harness fails.
    """
    answers: list[Mapping[str, Any]] = []
    models: Sequence[LoadedModel] = [loaded] if original is None else [loaded, original]
    confined = harness.sandboxed_templates(tasks.package) if tasks.sandboxed else nullcontext()
    with confined:
        for done, model in enumerate(models):
            if model.tokenizer is None:
                raise CheckpointError(f"{model.path}: no tokenizer for --tasks; add its files")
            progress("answering tasks", done, len(models))
            wrapped = harness.wrapped(tasks.package, model, options.batch, progress)
            answers.append(
                harness.run(
                    tasks.package,
                    wrapped,
                    tasks.found,
                    tasks.manager,
                    shots=options.shots,
                    limit=options.limit,
                    trusted=options.trust_code,
                )
            )
        progress("answering tasks", len(models), len(models))
    return read_scores(answers[0], answers[1] if len(answers) > 1 else None)
