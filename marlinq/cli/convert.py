"""``marlinq convert``."""

from __future__ import annotations

from pathlib import Path

import click

from marlinq.cli.options import FOLDER, json_option, shard_size_option
from marlinq.cli.output import print_report, progress_bar
from marlinq.core.errors import UsageError
from marlinq.formats import LAYOUTS


def _pair(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str | None, str | None]:
    """``SOURCE-to-TARGET`` as two layout names; ``auto`` as two Nones."""
    if value == "auto":
        return None, None
    source, found, target = value.partition("-to-")
    if not found or source not in LAYOUTS or target not in LAYOUTS:
        names = ", ".join(LAYOUTS)
        raise click.BadParameter(f"expected auto, or SOURCE-to-TARGET with two of {names}; found {value!r}")
    return source, target


@click.command("convert", short_help="Convert a checkpoint to another layout, without loss.")
@click.argument("pair", callback=_pair, metavar="SOURCE-to-TARGET|auto")
@click.argument("source", type=FOLDER, metavar="SRC")
@click.argument("target_dir", type=FOLDER, metavar="DST")
@click.option(
    "--to", "to", type=click.Choice(list(LAYOUTS)), help="The target layout when the source is auto."
)
@click.option(
    "--strict-marlin",
    is_flag=True,
    help="Allow in marlin only the shapes of the original kernel: K%128, N%256, group 128 or -1.",
)
@click.option(
    "--skip-unsupported",
    is_flag=True,
    help="Keep modules of shapes that the target excludes unquantised instead of refusing; they are named.",
)
@shard_size_option
@json_option
def command(
    pair: tuple[str | None, str | None],
    source: Path,
    target_dir: Path,
    to: str | None,
    strict_marlin: bool,
    skip_unsupported: bool,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Convert the quantised checkpoint SRC to another layout in the new folder DST, without loss.

    SOURCE and TARGET are gptq, gptq-v2, awq, marlin or compressed-tensors, as in gptq-to-marlin. With auto
    the source is detected and --to names the target. A conversion that would lose a bit is refused, with the
    module and the reason.
    """
    source_format, target_format = pair
    if target_format is None:
        target_format = to
        if target_format is None:
            raise UsageError("convert auto: the target layout is missing; add --to, such as --to marlin")
    elif to is not None:
        raise UsageError(f"--to {to}: only goes with auto; the pair already names {target_format}")
    from marlinq.operations.convert import convert

    with progress_bar() as progress:
        report = convert(
            source,
            target_dir,
            source_format=source_format,
            target_format=target_format,
            strict_marlin=strict_marlin,
            skip_unsupported=skip_unsupported,
            max_shard_size=max_shard_size,
            progress=progress,
        )
    print_report(report, as_json=as_json)
