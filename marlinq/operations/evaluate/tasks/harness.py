"""The boundary to lm-evaluation-harness: its imports, its wrapper around our models, its templates."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marlinq.core import boundaries
from marlinq.core.errors import EnvironmentProblem, MarlinqError, UnsupportedError, UsageError
from marlinq.core.progress import ReportProgress
from marlinq.core.version import install_command
from marlinq.runtime import LoadedModel
from marlinq.runtime.generation import generate_batch, position_limit

INSTALL = install_command("eval")

_BOOTSTRAPS = 1000
"""Bootstrap samples for the standard error of scores that are not means over documents (such as F1). The
harness's default of 100,000 takes minutes."""
_SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
_SEED = 1234
_ENVIRONMENT_PROBES = ("get_git_commit_hash", "add_env_info")
"""functions of ``lm_eval.evaluator`` that run git and pip; their results are not used"""


@dataclass(frozen=True)
class Harness:
    """The functions and classes of lm-evaluation-harness that are used.

    Attributes:
        version: version of the package.
        simple_evaluate: function that runs tasks on a model.
        manager: class of the index of tasks.
        wrapper: class that wraps a transformers model.
        evaluator: module of ``simple_evaluate``.
        utils: module that renders templates.
        load_yaml: function that reads a task file and imports the functions that it names.
        metrics: names of the built-in metrics.
    """

    version: str
    simple_evaluate: Any
    manager: Any
    wrapper: Any
    evaluator: Any
    utils: Any
    load_yaml: Any
    metrics: frozenset[str]


def open_harness() -> Harness:
    """Imports the harness.

    Raises:
        EnvironmentProblem: it is not installed, or its version has other functions and classes.
    """
    try:
        import lm_eval
        from lm_eval import evaluator, utils
        from lm_eval.api import metrics as _registers
        from lm_eval.api.registry import METRIC_REGISTRY
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        from lm_eval.tasks._yaml_loader import load_yaml
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "lm_eval":
            raise EnvironmentProblem(
                f"--tasks needs lm-evaluation-harness, which is not installed; install it: {INSTALL}"
            ) from None
        raise _other_version(error) from error
    except ImportError as error:
        raise _other_version(error) from error
    del _registers
    return Harness(
        str(lm_eval.__version__),
        lm_eval.simple_evaluate,
        TaskManager,
        HFLM,
        evaluator,
        utils,
        load_yaml,
        frozenset(METRIC_REGISTRY.keys()),
    )


def _other_version(error: ImportError) -> EnvironmentProblem:
    return EnvironmentProblem(
        f"--tasks: lm-evaluation-harness can't be imported as expected ({boundaries.reason(error)}); install "
        f"the version that is known to work: {INSTALL}"
    )


def read_trusted(harness: Harness, path: str) -> dict[str, Any]:
    """A task file as the harness reads it: importing the functions that it names.

    Raises:
        UsageError: the file can't be read, or a function can't be imported.
    """
    try:
        task: dict[str, Any] = harness.load_yaml(path)
    except Exception as error:
        raise UsageError(
            f"--tasks {path}: can't be read ({boundaries.reason(error)}); correct the file"
        ) from error
    return task


@contextlib.contextmanager
def sandboxed_templates(harness: Harness) -> Iterator[None]:
    """Inside, the harness renders templates in Jinja's sandbox, where they can't reach Python's internals.

    Raises:
        EnvironmentProblem: this version of the harness has no ``lm_eval.utils.env`` to replace.
    """
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    usual = getattr(harness.utils, "env", None)
    if not isinstance(usual, jinja2.Environment):
        raise EnvironmentProblem(
            f"lm-evaluation-harness {harness.version} renders templates in a way that can't be sandboxed for "
            f"task files; install the tested version: {INSTALL}"
        )
    confined = SandboxedEnvironment(
        undefined=usual.undefined, keep_trailing_newline=usual.keep_trailing_newline
    )
    confined.filters.update(usual.filters)
    harness.utils.env = confined
    try:
        yield
    finally:
        harness.utils.env = usual


def wrapped(harness: Harness, loaded: LoadedModel, batch: int, progress: ReportProgress) -> Any:
    """``loaded`` wrapped for the harness: greedy generation runs our decode step, likelihoods the model's
    ``forward``.

    Args:
        harness: from :func:`open_harness`.
        loaded: model with a tokenizer.
        batch: requests per batch.
        progress: called while kernels are compiled.
    """

    class Model(harness.wrapper):  # type: ignore[misc, name-defined]
        def _model_generate(self, context: Any, max_length: int, stop: list[str], **options: Any) -> Any:
            rows = _prompts(context, options.get("attention_mask"))
            if options.get("do_sample") or options.get("temperature"):
                return super()._model_generate(context, max_length, stop, **options)
            try:
                made = generate_batch(
                    loaded,
                    rows,
                    max_new_tokens=max_length - context.shape[1],
                    until=stop,
                    progress=progress,
                )
            except UnsupportedError:
                # Rows of different length, and layers that can't be told to ignore padding.
                return super()._model_generate(context, max_length, stop, **options)
            return _padded(context, [row.tokens for row in made.rows], self.tokenizer.pad_token_id)

    with _to_stderr(), boundaries.forward(loaded.path):
        return Model(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            batch_size=batch,
            max_length=position_limit(loaded.model),
        )


def _prompts(context: Any, mask: Any) -> list[list[int]]:
    """The tokens of each row of ``context`` [rows, length] without padding, which ``mask`` marks with 0."""
    if mask is None:
        return [list(row) for row in context.tolist()]
    return [row[kept.bool()].tolist() for row, kept in zip(context, mask, strict=True)]


def _padded(context: Any, made: Sequence[Sequence[int]], padding: int) -> Any:
    """``context`` [rows, length] with each row's new tokens appended, padded to the longest row."""
    longest = max(len(tokens) for tokens in made)
    new = context.new_full((len(made), longest), padding)
    for row, tokens in zip(new, made, strict=True):
        row[: len(tokens)] = row.new_tensor(tokens)
    return new.new_tensor([[*old, *more] for old, more in zip(context.tolist(), new.tolist(), strict=True)])


def run(
    harness: Harness,
    model: Any,
    tasks: Sequence[str | Mapping[str, Any]],
    manager: Any,
    *,
    shots: int | None,
    limit: int | None,
    trusted: bool,
) -> Mapping[str, Any]:
    """Runs tasks on a model and returns the results of the harness's ``simple_evaluate``.

    Args:
        harness: from :func:`open_harness`.
        model: from :func:`wrapped`.
        tasks: names of tasks, or tasks as mappings.
        manager: the harness's index of tasks.
        shots: examples in front of each document; None for the task's own number.
        limit: largest number of documents per task; None for all.
        trusted: allow tasks that run code, such as programs that the model writes as answers.

    Raises:
        EnvironmentProblem: the harness fails, most often because a data set can't be downloaded, or is
            another version.
    """
    named = ", ".join(task if isinstance(task, str) else str(task["task"]) for task in tasks)
    try:
        with _to_stderr(), _without_environment_probes(harness):
            results = harness.simple_evaluate(
                model,
                tasks=list(tasks),
                num_fewshot=shots,
                limit=limit,
                task_manager=manager,
                bootstrap_iters=_BOOTSTRAPS,
                confirm_run_unsafe_code=trusted,
                **dict.fromkeys(_SEEDS, _SEED),
            )
    except MarlinqError:
        raise
    except Exception as error:
        stopped = (
            f"--tasks {named}: lm-evaluation-harness {harness.version} stopped ({boundaries.reason(error)})"
        )
        if not any(isinstance(task, str) for task in tasks):
            raise UsageError(f"{stopped}; compare the keys of the task's YAML with its documents") from error
        raise EnvironmentProblem(
            f"{stopped}; data sets of its tasks come from the Hub, local files need none"
        ) from error
    if not isinstance(results, Mapping):
        raise EnvironmentProblem(f"--tasks {named}: lm-evaluation-harness returned nothing; run one process")
    return results


@contextlib.contextmanager
def _without_environment_probes(harness: Harness) -> Iterator[None]:
    """Inside, the harness runs neither git nor pip to describe its surroundings: in a folder from a stranger
    git runs what its configuration names, and Python imports ``pip.py``."""
    usual = {name: getattr(harness.evaluator, name, None) for name in _ENVIRONMENT_PROBES}
    if None in usual.values():
        raise EnvironmentProblem(
            f"lm-evaluation-harness {harness.version} lacks {' or '.join(_ENVIRONMENT_PROBES)}, which "
            "marlinq replaces, as they run git and pip in the current folder; install the tested version: "
            f"{INSTALL}"
        )
    for name in usual:
        setattr(harness.evaluator, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(harness.evaluator, name, function)


@contextlib.contextmanager
def _to_stderr() -> Iterator[None]:
    # The harness prints while it runs; stdout is kept for the report, which may be JSON.
    with contextlib.redirect_stdout(sys.stderr):
        yield
