"""``marlinq eval``."""

from __future__ import annotations

import click

from marlinq.cli.options import model_options, refuse_options
from marlinq.cli.output import print_explained, showing_progress
from marlinq.cli.types import SOURCE, TEXT, names
from marlinq.core.errors import UsageError


@click.command(
    "eval",
    short_help="Measure perplexity and the divergence from an original.",
    context_settings={"show_default": True},
)
@click.argument("model", type=SOURCE)
@click.option(
    "--against",
    type=SOURCE,
    metavar="ORIGINAL",
    help="Also measure KL divergence and top-1 agreement with this model.",
)
@click.option(
    "--text",
    type=TEXT,
    metavar="FILE|DATASET",
    help="Text to evaluate on; by default the original (or MODEL) generates it from a fixed seed.",
)
@click.option(
    "--windows", type=click.IntRange(1, 1 << 31), default=32, help="Largest number of windows of text."
)
@click.option("--length", type=click.IntRange(2, 1 << 31), default=1024, help="Tokens per window.")
@click.option(
    "--tasks",
    metavar="TASK,TASK,...",
    callback=names,
    multiple=True,
    help="Also score tasks of lm-evaluation-harness (the extra [eval]), by name or YAML file.",
)
@click.option(
    "--task-limit",
    type=click.IntRange(1, 1 << 31),
    metavar="N",
    help="Largest number of documents per task; by default all.",
)
@click.option(
    "--shots",
    type=click.IntRange(0, 1000),
    help="Few-shot examples before each document; by default the task's own number.",
)
@click.option("--task-batch", type=click.IntRange(1, 1 << 20), default=8, help="Task requests per batch.")
@click.option(
    "--trust-task-code",
    is_flag=True,
    help="Run Python code that a task file names, and programs that the model writes as answers.",
)
@click.option("--keep", is_flag=True, help="Write the figures into MODEL's folder and model card.")
@model_options
@click.pass_context
def command(
    context: click.Context,
    /,
    model: str,
    against: str | None,
    text: str | None,
    windows: int,
    length: int,
    tasks: tuple[str, ...],
    task_limit: int | None,
    shots: int | None,
    task_batch: int,
    trust_task_code: bool,
    keep: bool,
    revision: str | None,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """Measure the perplexity of MODEL, quantised or not, and its divergence from an original.

    --revision applies to MODEL only; an original on the Hub is read from its main branch.

    Tasks are those of lm-evaluation-harness and run after the text. With --against, recovery is MODEL's score
    in per cent of the original's, with the standard error over the same documents.
    """
    if not tasks:
        refuse_options(
            context,
            "shots",
            "task_limit",
            "task_batch",
            "trust_task_code",
            reason="only with --tasks; add it, or leave this out",
        )
    if text == "self":
        raise UsageError("--text self: leave --text out; the original, or MODEL, then writes the text")
    from marlinq.operations.evaluate import TaskOptions, evaluate

    options = TaskOptions(tasks, shots, task_limit, task_batch, trust_task_code) if tasks else None

    with showing_progress() as progress:
        report = evaluate(
            model,
            against=against,
            text=text,
            windows=windows,
            length=length,
            revision=revision,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            tasks=options,
            keep=keep,
            progress=progress,
        )
    print_explained(report, as_json=as_json, explain=explain)
