"""``marlinq rotate``."""

from __future__ import annotations

from pathlib import Path

import click

from marlinq.checkpoint import check_place
from marlinq.cli.options import (
    device_option,
    output_options,
    revision_option,
    shard_size_option,
    trust_remote_code_option,
)
from marlinq.cli.output import print_report, showing_progress
from marlinq.cli.types import FOLDER, SOURCE
from marlinq.core.model_source import local_folder


@click.command("rotate", short_help="Rotate a model's residual stream, so that 4 bits cost less.")
@click.argument("source", type=SOURCE, metavar="SRC")
# Eager: a missing DST is reported before the source is checked.
@click.argument("out", type=FOLDER, metavar="DST", is_eager=True)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of the rotation."
)
@device_option
@trust_remote_code_option
@revision_option
@shard_size_option
@output_options
def command(
    source: str,
    out: Path,
    seed: int,
    device: str,
    trust_remote_code: bool,
    revision: str | None,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Write the unquantised model SRC to the new folder DST with its residual stream rotated.

    DST computes the same function and is an ordinary checkpoint, to be quantised with gptq instead of SRC.
    The rotation makes weights that share a scale more similar, which helps most where a whole channel shares
    one. It makes the methods imatrix and rtn worse. Only models with Llama's block structure can be rotated.
    An output head that is tied to the embedding gets a weight of its own.
    """
    check_place(out, resume=True, source=local_folder(source))
    from marlinq.operations.rotate import rotate

    with showing_progress() as progress:
        report = rotate(
            source,
            out,
            seed=seed,
            device=device,
            revision=revision,
            trust_remote_code=trust_remote_code,
            max_shard_size=max_shard_size,
            progress=progress,
        )
    print_report(report, as_json=as_json)
