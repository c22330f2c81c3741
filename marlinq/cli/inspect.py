"""``marlinq inspect``."""

from __future__ import annotations

from dataclasses import replace

import click

from marlinq.cli.options import output_options, revision_option
from marlinq.cli.output import print_report, showing_progress
from marlinq.cli.types import SOURCE
from marlinq.core.errors import VerificationFailed


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
@click.option(
    "--for",
    "server",
    type=click.Choice(("vllm", "sglang", "transformers", "gptqmodel", "marlinq")),
    help="Judge CKPT for one server alone; the exit code is 0 only if that server loads it.",
)
@revision_option
@output_options
def command(
    checkpoint: str,
    modules: bool,
    tensor_parallel: int,
    server: str | None,
    revision: str | None,
    as_json: bool,
) -> int:
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
    if server is not None:
        found = replace(found, servers=tuple(each for each in found.servers if each.server.lower() == server))
    print_report(found, as_json=as_json)
    # A model that is not quantised is not judged.
    loads = server is None or found.format is None or any(each.loads for each in found.servers)
    return 0 if loads else VerificationFailed.exit_code
