"""Tasks on a model and on the original, in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from marlinq.core.errors import CheckpointError, UsageError
from marlinq.core.progress import ReportProgress
from marlinq.operations.evaluate.tasks import files, harness
from marlinq.operations.evaluate.tasks.scores import TaskScore, read_scores
from marlinq.runtime import LoadedModel


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks, and how they are run.

    Attributes:
        names: names of tasks of the harness, or YAML files of its kind.
        shots: examples in front of each document; None for as many as the task says.
        limit: documents of each task, at most; None for all.
        batch: requests that run together.
        trust_code: run Python that task files name, and programs that a model writes for a task.
    """

    names: tuple[str, ...]
    shots: int | None = None
    limit: int | None = None
    batch: int = 8
    trust_code: bool = False


@dataclass(frozen=True)
class Tasks:
    """Tasks that were found, before anything is loaded.

    Attributes:
        found: names, or tasks as mappings.
        manager: the harness's index.
        package: the harness.
        sandboxed: whether a file that is not trusted is among them.
    """

    found: tuple[str | Mapping[str, Any], ...]
    manager: Any
    package: harness.Harness
    sandboxed: bool


def check_tasks(options: TaskOptions) -> Tasks:
    """The tasks that ``options`` names.

    Raises:
        EnvironmentProblem: the harness is not installed.
        UsageError: an unknown task, or a file that can't be read or is not trusted to run code.
    """
    local = [name for name in options.names if files.is_task_file(name)]
    package = harness.open_harness()
    # Its own thousands of files take half a minute to read.
    manager = package.manager(include_defaults=len(local) < len(options.names))
    found: list[str | Mapping[str, Any]] = []
    for name in options.names:
        if not files.is_task_file(name):
            known = set(manager.all_tasks)
            if name not in known:
                near = _nearest(name, known)
                raise UsageError(
                    f"--tasks {name}: lm-evaluation-harness {package.version} has no such task{near}; "
                    "lm-eval ls tasks lists them"
                )
            found.append(name)
        elif options.trust_code:
            found.append(files.with_local_data(name, harness.read_trusted(package, name)))
        else:
            found.append(files.read_task(name, package.metrics))
    return Tasks(tuple(found), manager, package, bool(local) and not options.trust_code)


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
    """The scores of a model, beside those of the original.

    Raises:
        CheckpointError: a model has no tokenizer.
        EnvironmentProblem: the harness stops.
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
