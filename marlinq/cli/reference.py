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
    contexts = _contexts(click.Context(cli, info_name="marlinq", terminal_width=_WIDTH))
    parts.extend(f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n" for context in contexts)
    return "\n".join(parts)


def _contexts(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            if command is not None:
                settings = command.context_settings
                yield from _contexts(
                    click.Context(command, parent=context, info_name=name, terminal_width=_WIDTH, **settings)
                )


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def main(path: Path) -> None:
    """Write the reference to PATH."""
    path.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
