"""``marlinq doctor``."""

from __future__ import annotations

import click

from marlinq.cli.options import output_options
from marlinq.cli.output import print_report
from marlinq.core.errors import EnvironmentProblem


@click.command("doctor", short_help="Say what works on this machine, and how to fix the rest.")
@output_options
def command(as_json: bool) -> int:
    """Say what is installed, which parts of marlinq work on this machine, and how to fix the rest.

    The exit code is 0 if everything that needs no GPU works.
    """
    from marlinq.operations.doctor import examine

    report = examine()
    print_report(report, as_json=as_json)
    return 0 if report.ok else EnvironmentProblem.exit_code
