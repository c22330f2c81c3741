"""``marlinq inspect``."""

from __future__ import annotations

import click

from marlinq.cli.options import output_options, revision_option
from marlinq.cli.output import print_report, showing_progress
from marlinq.cli.types import SOURCE


@click.command("inspect", short_help="Say what a checkpoint holds and which servers load it.")
@click.argument("checkpoint", type=SOURCE, metavar="CKPT")
@click.option("--modules", is_flag=True, help="List every module.")
@click.option(
    "--tp",
    "tensor_parallel",
    type=click.IntRange(1, 1 << 31),
    default=1,
    metavar="N",
    help="Judge the servers with every layer split over N GPUs (tensor parallelism).",
)
@revision_option
@output_options
def command(
    checkpoint: str, modules: bool, tensor_parallel: int, revision: str | None, as_json: bool
) -> None:
    """Say what the quantised checkpoint CKPT holds, its size, which servers load it and with which kernel.

    Reads headers, configuration and the small tensors, not the weights.
    """
    from marlinq.operations.inspect import inspect

    with showing_progress() as progress:
        found = inspect(
            checkpoint,
            modules=modules,
            tensor_parallel=tensor_parallel,
            revision=revision,
            progress=progress,
        )
    print_report(found, as_json=as_json)
