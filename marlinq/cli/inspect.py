"""``marlinq inspect``."""

from __future__ import annotations

import click

from marlinq.cli.options import output_options, revision_option
from marlinq.cli.output import print_report, showing_progress
from marlinq.cli.types import SOURCE
from marlinq.core.errors import VerificationFailed


@click.command("inspect", short_help="Say what a checkpoint holds and which servers load it.")
@click.argument("checkpoint", type=SOURCE, metavar="CKPT")
@click.option("--modules", is_flag=True, help="List every linear.")
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
    help="Judge CKPT for this server only; the exit code is 0 only if the server was judged and loads it.",
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
    """Describe the checkpoint CKPT: its contents and size, the servers that load it, and their kernels.

    Only headers, configuration and small tensors are read.
    """
    from marlinq.operations.inspect import inspect

    with showing_progress() as progress:
        report = inspect(
            checkpoint,
            modules=modules,
            build=server == "marlinq",
            tensor_parallel=tensor_parallel,
            revision=revision,
            progress=progress,
        )
    if server is not None:
        report = report.only(server)
    print_report(report, as_json=as_json)
    # A server that was not judged, which a line says, is not known to load the checkpoint.
    loads = server is None or any(each.loads for each in report.servers)
    return 0 if loads else VerificationFailed.exit_code
