"""The boundary to lm-evaluation-harness: its imports, its model wrapper around ours, its templates."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marlinq.core import boundaries
from marlinq.core.errors import EnvironmentProblem, MarlinqError, UnsupportedError, UsageError
from marlinq.core.progress import ReportProgress
from marlinq.runtime import LoadedModel
from marlinq.runtime.generation import generate_batch, position_limit

INSTALL = 'pip install "marlinq[eval]"'

# Of scores that are no means of documents; the harness's default takes minutes for a few of them.
_BOOTSTRAPS = 1000
_SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
_SEED = 1234


@dataclass(frozen=True)
class Harness:
    """The parts of lm-evaluation-harness that are used.

    Attributes:
        version: version of the package.
        simple_evaluate: runs tasks on a model.
        manager: the class of its index of tasks.
        wrapper: the class that wraps a transformers model.
        utils: the module that renders templates.
        load_yaml: reads a task file, and imports the functions that it names.
        metrics: names of the metrics that it brings.
    """

    version: str
    simple_evaluate: Any
    manager: Any
    wrapper: Any
    utils: Any
    load_yaml: Any
    metrics: frozenset[str]


def open_harness() -> Harness:
    """Imports the harness.

    Raises:
        EnvironmentProblem: it is not installed, or has other parts than the version that is known.
    """
    try:
        import lm_eval
        from lm_eval import utils
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
    """A task file as the harness reads it: functions that it names are imported.

    Raises:
        UsageError: it can't be read, or what it names can't be imported.
    """
    try:
        task: dict[str, Any] = harness.load_yaml(path)
    except Exception as error:
        raise UsageError(
            f"--tasks {path}: can't be read ({boundaries.reason(error)}); mend the file"
        ) from error
    return task


@contextlib.contextmanager
def sandboxed_templates(harness: Harness) -> Iterator[None]:
    """The harness renders templates without reach to Python's objects; its own environment allows it.

    Raises:
        EnvironmentProblem: this version keeps its environment elsewhere.
    """
    import jinja2
    from jinja2.sandbox import SandboxedEnvironment

    usual = getattr(harness.utils, "env", None)
    if not isinstance(usual, jinja2.Environment):
        raise EnvironmentProblem(
            f"lm-evaluation-harness {harness.version} renders templates in an unknown way, so files of tasks "
            f"can't be sandboxed; install the version that is known to work: {INSTALL}"
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
    """The harness's model around ``loaded``: greedy text comes from our decode step, likelihoods from the
    model's forward.

    Args:
        harness: from :func:`open_harness`.
        loaded: with a tokenizer.
        batch: requests that run together.
        progress: told about kernels that are compiled.
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
    """The tokens of each row of ``context`` [rows, length] without its padding."""
    if mask is None:
        return [list(row) for row in context.tolist()]
    return [row[kept.bool()].tolist() for row, kept in zip(context, mask, strict=True)]


def _padded(context: Any, made: Sequence[Sequence[int]], padding: int) -> Any:
    """``context`` with the new tokens of each row behind it, [rows, length + most of them]."""
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
    """What ``simple_evaluate`` returns.

    Args:
        harness: from :func:`open_harness`.
        model: from :func:`wrapped`.
        tasks: names, or tasks as mappings.
        manager: the index that knows the names.
        shots: examples in front of each document; None for as many as the task says.
        limit: documents of each task, at most.
        trusted: run code that tasks bring, such as programs that the model wrote for them.

    Raises:
        EnvironmentProblem: the harness fails; most often a data set can't be fetched.
    """
    named = ", ".join(task if isinstance(task, str) else str(task["task"]) for task in tasks)
    try:
        with _to_stderr():
            found = harness.simple_evaluate(
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
        raise EnvironmentProblem(
            f"--tasks {named}: lm-evaluation-harness {harness.version} stopped ({boundaries.reason(error)}); "
            "data sets of its tasks come from the Hub, local files need none"
        ) from error
    if not isinstance(found, Mapping):
        raise EnvironmentProblem(f"--tasks {named}: lm-evaluation-harness returned nothing; run one process")
    return found


@contextlib.contextmanager
def _to_stderr() -> Iterator[None]:
    # It prints as it goes, and stdout may be a JSON object's.
    with contextlib.redirect_stdout(sys.stderr):
        yield
