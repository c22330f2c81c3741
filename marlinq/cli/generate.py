"""``marlinq generate``."""

from __future__ import annotations

import click

from marlinq.cli.options import (
    device_option,
    dtype_option,
    json_option,
    trust_remote_code_option,
)
from marlinq.cli.output import print_piece, print_report, progress_bar
from marlinq.cli.types import SOURCE
from marlinq.core.errors import UsageError


@click.command("generate", short_help="Continue a prompt.", context_settings={"show_default": True})
@click.argument("checkpoint", type=SOURCE, metavar="CKPT")
@click.option("--prompt", required=True, help="Text to continue.")
@click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=128, help="Tokens to generate, at most."
)
@click.option("--greedy", is_flag=True, help="Take the likeliest token every time.")
@click.option(
    "--temperature",
    type=click.FloatRange(min=0, min_open=True),
    help="Sample with this temperature. [default: 1.0]",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the sampling.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@device_option
@dtype_option
@trust_remote_code_option
@json_option
def command(
    checkpoint: str,
    prompt: str,
    max_new_tokens: int,
    greedy: bool,
    temperature: float | None,
    seed: int,
    chat: bool,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    as_json: bool,
) -> None:
    """Load the checkpoint CKPT and continue a prompt; prints the text as it comes, then tokens a second."""
    if greedy and temperature is not None:
        raise UsageError("--greedy and --temperature contradict each other; keep one")
    from marlinq.runtime import generate, load

    with progress_bar() as progress:
        loaded = load(
            checkpoint,
            device=device,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    report = generate(
        loaded,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=None if greedy else temperature or 1.0,
        seed=seed,
        chat=chat,
        on_text=None if as_json else print_piece,
    )
    if not as_json:
        print_piece("\n\n")
    print_report(report, as_json=as_json)
