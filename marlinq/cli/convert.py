"""``marlinq convert``."""

from __future__ import annotations

from pathlib import Path

import click

from marlinq.checkpoint import check_place
from marlinq.cli.options import output_options, revision_option, shard_size_option
from marlinq.cli.output import print_report, showing_progress
from marlinq.cli.types import FOLDER, FORMAT, PAIR, SOURCE, TARGET, SettingType
from marlinq.core.errors import UsageError
from marlinq.core.model_source import local_folder
from marlinq.core.schemes import SCHEMES
from marlinq.core.settings import Choice
from marlinq.formats import FORMATS

_USAGE = "marlinq convert SRC DST --to FORMAT, or marlinq convert SOURCE-to-TARGET SRC DST"


@click.command("convert", short_help="Convert a checkpoint to another layout, without loss.")
@click.argument("places", nargs=-1, metavar="[SOURCE-to-TARGET] SRC DST")
@click.option(
    "--to",
    "to",
    type=TARGET,
    help="Format of DST; dense has dequantised weights (in bfloat16 only with --allow-loss).",
)
@click.option("--from", "from_", type=FORMAT, help="Format that SRC must have; by default it is detected.")
@click.option(
    "--scheme",
    type=SettingType(Choice(SCHEMES)),
    help="Give every module this scheme, if the weights stay exactly the same, as from mxfp4 to nvfp4.",
)
@click.option(
    "--allow-loss",
    is_flag=True,
    help="Round weights that DST can't hold exactly, such as FP8 blocks as channels, and report the error.",
)
@click.option(
    "--strict-marlin",
    is_flag=True,
    help="With --to marlin or marlin-24, refuse modules that the original kernel does not take: Marlin's "
    "needs K divisible by 128, N by 256, and group size 128 or -1.",
)
@click.option(
    "--skip-unsupported",
    is_flag=True,
    help="Store modules dequantised where the target can't hold their shape, instead of refusing; they are "
    "listed.",
)
@revision_option
@shard_size_option
@output_options
@click.pass_context
def command(
    context: click.Context,
    /,
    places: tuple[str, ...],
    to: str | None,
    from_: str | None,
    scheme: str | None,
    allow_loss: bool,
    strict_marlin: bool,
    skip_unsupported: bool,
    revision: str | None,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Convert the quantised checkpoint SRC to another format in the new folder DST, without loss.

    Name the target with --to, as in: marlinq convert SRC DST --to awq. Or name both formats first, as in:
    marlinq convert gptq-to-awq SRC DST; SRC must then have the first format. A conversion that would change a
    weight is refused, with the module and the reason, unless --allow-loss is given.
    """
    source_format, target_format, source, target = _request(context, places, from_, to)
    if source_format == target_format and scheme is None:
        raise UsageError(
            f"convert: SRC and DST are both {target_format}, nothing to convert; name another target"
        )
    targets = [name for name, each in FORMATS.items() if each.original_kernel]
    if strict_marlin and target_format not in targets:
        raise UsageError(f"--strict-marlin: expected --to {' or '.join(targets)}, found {target_format}")
    SOURCE.convert(source, None, context)
    out = FOLDER.convert(target, None, context)
    check_place(out, resume=True, source=local_folder(source))
    from marlinq.operations.convert import convert

    with showing_progress() as progress:
        report = convert(
            source,
            out,
            revision=revision,
            source_format=source_format,
            target_format=target_format,
            scheme=scheme,
            allow_loss=allow_loss,
            strict_marlin=strict_marlin,
            skip_unsupported=skip_unsupported,
            max_shard_size=max_shard_size,
            progress=progress,
        )
    print_report(report, as_json=as_json)


def _request(
    context: click.Context, places: tuple[str, ...], from_: str | None, to: str | None
) -> tuple[str | None, str, str, str]:
    """(source format or None, target format, source folder, target folder).

    Raises:
        UsageError: a format or folder is missing, or given twice.
    """
    if len(places) == 3:
        pair, source, target = places
        if pair == "auto":
            return from_, _wanted(to), source, target
        given = [option for option, value in (("--from", from_), ("--to", to)) if value is not None]
        if given:
            raise UsageError(f"{given[0]}: {pair} names both formats already; leave out {given[0]}")
        source_format, target_format = PAIR.convert(pair, None, context)
        return source_format, target_format, source, target
    if len(places) == 2:
        if "-to-" in places[0].replace("_", "-") and not Path(places[0]).exists():
            raise UsageError(f"convert {places[0]}: expected SRC and DST after it, found {places[1]!r} alone")
        return from_, _wanted(to), places[0], places[1]
    raise UsageError(f"convert: expected a source and a target folder, found {len(places)} paths; {_USAGE}")


def _wanted(to: str | None) -> str:
    if to is None:
        raise UsageError("convert: the target format is missing; add --to, such as --to marlin")
    return to
