"""Write the command-line reference: ``python -m marlinq.cli.reference docs/cli.md``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from marlinq.cli import cli

_WIDTH = 100


def reference() -> str:
    """The ``--help`` of every command as one Markdown page."""
    parts = ["# Command-line reference\n\nGenerated from `--help` by `make docs`; don't edit by hand.\n"]
    parts.extend(f"## {path}\n\n```text\n{text}\n```\n" for path, text in _helps(cli, None, "marlinq"))
    return "\n".join(parts)


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
