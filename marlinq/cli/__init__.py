"""The command line: every command parses its arguments, calls one operation and prints its report.

Commands live one to a file and are imported when they are asked for; none of them imports torch before it
runs, so ``marlinq --help`` answers at once.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import click

from marlinq.cli.options import verbosity_options
from marlinq.cli.output import (
    INTERRUPTED_CODE,
    log_safely,
    print_error,
    print_json,
    print_line,
    show_warnings_briefly,
)
from marlinq.cli.types import suggestion
from marlinq.core.command import remembered
from marlinq.core.errors import MarlinqError, UsageError
from marlinq.core.version import __version__

COMMANDS = {
    "recommend": "marlinq.cli.recommend",
    "rotate": "marlinq.cli.rotate",
    "quantize": "marlinq.cli.quantize",
    "convert": "marlinq.cli.convert",
    "verify": "marlinq.cli.verify",
    "inspect": "marlinq.cli.inspect",
    "report": "marlinq.cli.report",
    "eval": "marlinq.cli.evaluate",
    "generate": "marlinq.cli.generate",
    "bench": "marlinq.cli.bench",
    "doctor": "marlinq.cli.doctor",
}
"""Name of each command -> module that defines it as ``command``; in the order of ``--help``."""

_CONTINUES = {"quantize": ("--resume",), "convert": (), "rotate": ()}
"""Command that continues an unfinished folder -> options that this needs."""

_WAIT_POLICY = "OMP_WAIT_POLICY"
"""How OpenMP's threads wait for each other; read when torch is imported."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(COMMANDS[cmd_name]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # No suggestion during shell completion, where an unknown command has no completions.
        known = ctx.resilient_parsing or not args or args[0].startswith("-") or args[0] in COMMANDS
        if not known:
            names = ", ".join(COMMANDS)
            near = suggestion(args[0].lower(), COMMANDS)
            ctx.fail(f"No such command {args[0]!r}{near}; the commands are {names}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@verbosity_options
@click.version_option(__version__, "--version", prog_name="marlinq", message="%(prog)s %(version)s")
def cli() -> None:
    """Quantise language models to 4 or 8 bits, convert between checkpoint formats, verify and run them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with the command's exit code.

    0 means success; the errors of ``marlinq.core.errors`` have their own codes (a usage error is 2, as in
    click); 130 means interrupted. Any other exception is a bug and keeps its traceback.
    """
    if sys.stderr is None:
        # It is closed. What is meant for it would go to stdout, into the result.
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in arguments
    # Passive: waiting OpenMP threads sleep, which costs a product about 20 us. If another process uses a
    # core, spinning threads keep the remaining work off the cores: 20 ms per product instead of 40 us.
    os.environ.setdefault(_WAIT_POLICY, "passive")
    show_warnings_briefly()
    log_safely()
    try:
        with remembered(arguments):
            status = cli.main(args=arguments, prog_name="marlinq", standalone_mode=False)
    except click.Abort:
        _say_interrupted(arguments, as_json=as_json)
        sys.exit(INTERRUPTED_CODE)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(UsageError.exit_code)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "marlinq"
        message = f"{error.format_message().rstrip('.')}; see {where} --help"
        sys.exit(print_error(UsageError(message), as_json=as_json))
    except click.ClickException as error:
        sys.exit(print_error(UsageError(error.format_message()), as_json=as_json))
    except MarlinqError as error:
        sys.exit(print_error(error, as_json=as_json))
    sys.exit(status if isinstance(status, int) else 0)


def _say_interrupted(arguments: list[str], *, as_json: bool) -> None:
    message = "interrupted"
    if arguments and (missing := _CONTINUES.get(arguments[0])) is not None:
        again = [*arguments, *(option for option in missing if option not in arguments)]
        message += f"; continue with: {shlex.join(['marlinq', *again])}"
    if as_json:
        value = {"error": message, "class": "KeyboardInterrupt", "exit_code": INTERRUPTED_CODE}
        print_json(value)
    else:
        print_line(message)
