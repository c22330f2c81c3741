"""Writes the command-line reference: ``python -m marlinq.cli.command_reference docs/cli.md``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from marlinq.cli import cli

_WIDTH = 100
_HEAD = """# Command-line reference

Every command and option, generated from `--help` by `make docs`; don't edit by hand. The [guide](guide.md)
has examples.
"""
_OPTION = re.compile(r"^  -.*\n?(?:^   .*\n?)*", re.M)
"""One option of a ``--help`` with all lines of its description."""


def reference() -> str:
    """The ``--help`` of every command as one Markdown page; options that all commands share appear once."""
    helps = list(_helps(cli, None, "marlinq"))
    options = [_OPTION.findall(text) for _, text in helps if not _is_group(text)]
    everywhere = set.intersection(*({_words(option) for option in each} for each in options))
    shared = "".join(option for option in options[-1] if _words(option) in everywhere)
    parts = [_HEAD, f"Every command also has these options:\n\n```text\n{shared.rstrip()}\n```\n"]
    for path, text in helps:
        own = _OPTION.sub(lambda option: "" if _words(option[0]) in everywhere else option[0], text)
        text = text if _is_group(text) else own.rstrip().removesuffix("\n\nOptions:")
        parts.append(f"## {path}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


def _is_group(text: str) -> bool:
    return "\nCommands:\n" in text


def _words(option: str) -> str:
    """An option without the spaces that align its description."""
    return " ".join(option.split())


def _helps(command: click.Command, parent: click.Context | None, name: str) -> Iterator[tuple[str, str]]:
    settings = {**command.context_settings, "terminal_width": _WIDTH}
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield context.command_path, context.get_help()
    if isinstance(command, click.Group):
        for child_name in command.list_commands(context):
            child = command.get_command(context, child_name)
            if child is not None:
                yield from _helps(child, context, child_name)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def main(path: Path) -> None:
    """Write the reference to PATH."""
    path.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
