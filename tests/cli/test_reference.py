"""docs/cli.md is what ``--help`` says."""

from __future__ import annotations

from pathlib import Path

from marlinq.cli import COMMANDS
from marlinq.cli.command_reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_reference_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: make docs"


def test_reference_has_every_command() -> None:
    for name in COMMANDS:
        assert f"## marlinq {name}\n" in reference()
