"""Options that several commands share, as decorators."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from marlinq.core.devices import check_device_name

_Command = TypeVar("_Command", bound=Callable[..., Any])

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", value.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise click.BadParameter(f"expected a size such as 5GB or 512MiB, found {value!r}")
    return size


def _device(ctx: click.Context, param: click.Parameter, value: str) -> str:
    return check_device_name(value)


def check_text(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """A callback for options that name a text: what is no file and no dataset's name is told before torch is
    imported; ``self`` is the model's own text."""
    if value not in (None, "self"):
        from marlinq.calibration.sources import Source

        Source.parse(value, split="train")
    return value


FOLDER = click.Path(path_type=Path)


def json_option(command: _Command) -> _Command:
    """``--json``: the report, or the error, as one JSON object on stdout."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(
        command
    )


def device_option(command: _Command) -> _Command:
    """``--device``: where the computation runs."""
    return click.option(
        "--device",
        metavar="DEVICE",
        callback=_device,
        default="auto",
        show_default=True,
        help="auto, cpu, cuda or cuda:N; auto takes the first GPU, if any.",
    )(command)


def shard_size_option(command: _Command) -> _Command:
    """``--max-shard-size``: the largest file of weights to write."""
    return click.option(
        "--max-shard-size",
        metavar="SIZE",
        callback=_size,
        default="5GB",
        show_default=True,
        help="Largest file of weights to write, such as 5GB or 512MiB.",
    )(command)


def trust_remote_code_option(command: _Command) -> _Command:
    """``--trust-remote-code``: off unless asked."""
    return click.option(
        "--trust-remote-code", is_flag=True, help="Run Python code that comes with the model. Off by default."
    )(command)


def dtype_option(command: _Command) -> _Command:
    """``--dtype``: of activations and unquantised weights."""
    return click.option(
        "--dtype",
        type=click.Choice(("auto", "float16", "bfloat16", "float32")),
        default="auto",
        show_default=True,
        help="Type of activations and unquantised weights; auto takes what the checkpoint names.",
    )(command)
