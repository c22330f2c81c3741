"""``marlinq inspect``."""

from __future__ import annotations

import click

from marlinq.cli.options import json_option
from marlinq.cli.output import print_report
from marlinq.cli.types import SOURCE


@click.command("inspect", short_help="Say what a checkpoint holds and what can run it.")
@click.argument("checkpoint", type=SOURCE, metavar="CKPT")
@click.option("--modules", is_flag=True, help="List every module.")
@json_option
def command(checkpoint: str, modules: bool, as_json: bool) -> None:
    """Say what the quantised checkpoint CKPT holds, its size, and which kernels can run it and why.

    Reads headers, configuration and the small tensors, not the weights.
    """
    from marlinq.operations.inspect import inspect

    print_report(inspect(checkpoint, modules=modules), as_json=as_json)
