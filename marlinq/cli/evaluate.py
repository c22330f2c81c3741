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
from marlinq.cli.types import SOURCE, TEXT


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
    revision: str | None,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    explain: bool,
    as_json: bool,
) -> None:
    """Measure the perplexity of MODEL, quantised or not, and how far it is from an original.

    --revision is MODEL's; an original on the Hub is read from its main branch.
    """
    from marlinq.operations.evaluate import evaluate

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
            progress=progress,
        )
    print_explained(report, as_json=as_json, explain=explain)
