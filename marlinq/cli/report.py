"""``marlinq report``."""

from __future__ import annotations

from pathlib import Path

import click

from marlinq.cli.options import output_options, revision_option
from marlinq.cli.output import print_report, showing_progress
from marlinq.cli.types import FOLDER, SOURCE


@click.command("report", short_help="Make a page about a quantised checkpoint, or about two.")
@click.argument("checkpoint", type=SOURCE, metavar="CKPT")
@click.argument("other", type=SOURCE, metavar="[CKPT]", required=False)
@click.option(
    "--out",
    type=FOLDER,
    default=Path(),
    metavar="FOLDER",
    help="Folder for report.html, report.csv and report.json; by default the current folder.",
)
@revision_option
@output_options
def command(checkpoint: str, other: str | None, out: Path, revision: str | None, as_json: bool) -> None:
    """Write report.html about the quantised checkpoint CKPT, or about two side by side.

    The page shows the error of each module, the worst modules, the distributions of codes and scales, tokens
    seen, time, size and recipe. It is one file that needs no network. report.csv and report.json hold the
    same figures. marlinq quantize writes all three into its output folder.
    """
    from marlinq.operations.report import report

    with showing_progress() as progress:
        written = report(checkpoint, other, out=out, revision=revision, progress=progress)
    print_report(written, as_json=as_json)
