"""``marlinq verify``."""

from __future__ import annotations

import click

from marlinq.cli.options import device_option, output_options, revision_option, trust_remote_code_option
from marlinq.cli.output import print_report, showing_progress
from marlinq.cli.types import SOURCE
from marlinq.core.errors import VerificationFailed


@click.command("verify", short_help="Check a quantised checkpoint.")
@click.argument("checkpoint", type=SOURCE, metavar="CKPT")
@click.option(
    "--against",
    type=SOURCE,
    metavar="ORIGINAL",
    help="Compare every weight with this model: the one that was quantised, or another conversion of CKPT.",
)
@click.option(
    "--logits", is_flag=True, help="Also run both models and compare the output of each layer and the logits."
)
@click.option(
    "--strict",
    is_flag=True,
    help="Fail on warnings too, such as one about a single word or zero point.",
)
@revision_option
@device_option
@trust_remote_code_option
@output_options
def command(
    checkpoint: str,
    against: str | None,
    logits: bool,
    strict: bool,
    revision: str | None,
    device: str,
    trust_remote_code: bool,
    as_json: bool,
) -> int:
    """Check the quantised checkpoint CKPT: structure, hashes, round trips, values, and kernels on a GPU.

    The exit code is 0 only if no check fails; with --strict, only if there is no warning either.
    """
    from marlinq.operations.verify import verify

    with showing_progress() as progress:
        report = verify(
            checkpoint,
            against=against,
            logits=logits,
            revision=revision,
            device=device,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    print_report(report, as_json=as_json)
    passed = report.ok and not (strict and report.warnings)
    return 0 if passed else VerificationFailed.exit_code
