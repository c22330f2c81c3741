"""Options that several commands share, as decorators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from marlinq.cli.output import VERBOSITY
from marlinq.cli.types import OneOf, Size
from marlinq.core.devices import check_device_name
from marlinq.core.errors import UsageError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _device(ctx: click.Context, param: click.Parameter, value: str) -> str:
    return check_device_name(value)


def output_options(command: _Command) -> _Command:
    """Adds ``--json`` (the report, or the error, as one JSON object on stdout) and
    :func:`verbosity_options`."""
    json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
    return json(verbosity_options(command))


def model_options(command: _Command) -> _Command:
    """How a model is loaded, :data:`explain_option`, and :func:`output_options`."""
    command = trust_remote_code_option(explain_option(output_options(command)))
    return revision_option(device_option(dtype_option(command)))


def given_options(context: click.Context, *names: str) -> list[str]:
    """Spellings of those of the options ``names`` that the command line gives, whatever their values."""
    return [
        option.opts[0]
        for option in context.command.params
        if option.name in names and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE
    ]


def refuse_options(context: click.Context, *names: str, reason: str) -> None:
    """Refuses those of the options ``names`` that the command line gives: they would be ignored.

    Raises:
        UsageError: one is given; the message names all that are, and ends with ``reason``.
    """
    if given := given_options(context, *names):
        raise UsageError(f"{' and '.join(given)}: {reason}")


def verbosity_options(command: _Command) -> _Command:
    """Adds ``--verbose`` and ``--quiet``, which may be given before or after the name of a command."""
    for names, level, text in (
        (("-q", "--quiet"), -1, "Print only the result, warnings and errors: no progress."),
        (("-v", "--verbose"), 1, "Also print how long each stage took."),
    ):
        command = click.option(
            *names, is_flag=True, expose_value=False, callback=partial(_set_verbosity, level), help=text
        )(command)
    return command


def _set_verbosity(level: int, ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and ctx.meta.setdefault(VERBOSITY, level) != level:
        raise UsageError("--quiet and --verbose contradict each other; keep one")


explain_option = click.option(
    "--explain", is_flag=True, help="Also say which kernels multiply the weights, and why."
)
"""``--explain``: prints the reason for every choice of a kernel after the report."""

device_option = click.option(
    "--device",
    metavar="DEVICE",
    callback=_device,
    default="auto",
    show_default=True,
    help="Device that computes: auto, cpu, cuda or cuda:N; auto is the first GPU, else the CPU.",
)
"""``--device``: device that computes."""

shard_size_option = click.option(
    "--max-shard-size",
    metavar="SIZE",
    type=Size(),
    default="5GB",
    show_default=True,
    help="Size of the largest file of weights, such as 5GB or 512MiB.",
)
"""``--max-shard-size``: size of the largest file of weights."""

trust_remote_code_option = click.option(
    "--trust-remote-code", is_flag=True, help="Run Python code that comes with the model. Off by default."
)
"""``--trust-remote-code``: run a model's own code."""
revision_option = click.option(
    "--revision", metavar="REV", help="Branch, tag or commit of a Hub id; by default its main branch."
)
"""``--revision``: revision of a model on the Hub."""

dtype_option = click.option(
    "--dtype",
    type=OneOf(("auto", "float16", "bfloat16", "float32"), {"fp16": "float16", "bf16": "bfloat16"}),
    default="auto",
    show_default=True,
    help="Type of activations and unquantised weights; auto is the checkpoint's own, on a CPU float32.",
)
"""``--dtype``: type of activations and unquantised weights."""
