"""``marlinq eval``."""

from __future__ import annotations

import click

from marlinq.cli.options import (
    device_option,
    dtype_option,
    explain_option,
    output_options,
    revision_option,
    trust_remote_code_option,
)
from marlinq.cli.output import print_explained, showing_progress
from marlinq.cli.types import SOURCE, TEXT, names
from marlinq.core.errors import UsageError


@click.command(
    "eval",
    short_help="Measure perplexity and the distance to an original.",
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
    help="Text to evaluate on; without it, text that the original generates from a fixed seed.",
)
@click.option(
    "--windows", type=click.IntRange(1, 1 << 31), default=32, help="Windows of text to evaluate, at most."
)
@click.option("--length", type=click.IntRange(2, 1 << 31), default=1024, help="Tokens a window.")
@click.option(
    "--tasks",
    metavar="TASK,TASK,...",
    callback=names,
    default="",
    help="Also score tasks of lm-evaluation-harness (the extra marlinq[eval]), by name or YAML file.",
)
@click.option(
    "--task-limit", type=click.IntRange(1, 1 << 31), metavar="N", help="Documents of each task, at most."
)
@click.option(
    "--shots",
    type=click.IntRange(0, 1000),
    help="Examples before each document; as the task says unless given.",
)
@click.option(
    "--task-batch", type=click.IntRange(1, 1 << 20), default=8, help="Requests of tasks that run together."
)
@click.option(
    "--trust-task-code",
    is_flag=True,
    help="Run Python that a task file names, and programs that a model writes for a task.",
)
@click.option("--keep", is_flag=True, help="Write the figures into MODEL's folder and its model card.")
@revision_option
@device_option
@dtype_option
@trust_remote_code_option
@explain_option
@output_options
def command(
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
    """Measure the perplexity of MODEL, quantised or not, and how far it is from an original.

    --revision is MODEL's; an original on the Hub is read from its main branch.

    Tasks come behind the text: with --against, recovery is MODEL's score in per cent of the original's, with
    its standard error over the same documents. Names and options of tasks are the harness's.
    """
    from marlinq.operations.evaluate import TaskOptions, evaluate

    options = TaskOptions(tasks, shots, task_limit, task_batch, trust_task_code) if tasks else None
    if options is None and (shots is not None or task_limit is not None or trust_task_code):
        raise UsageError("--shots, --task-limit and --trust-task-code go with --tasks; name tasks")

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
