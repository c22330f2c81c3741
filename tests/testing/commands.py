"""Running commands in this process, for their JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from marlinq.cli import main

Run = Callable[..., tuple[int, Any]]
"""``marlinq ARGUMENTS --json``: the exit code and the object that it prints."""


def json_runner(capsys: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command in this process."""

    def run(*arguments: object) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as exit_info:
            main([*map(str, arguments), "--json"])
        printed = capsys.readouterr().out
        return int(exit_info.value.code or 0), json.loads(printed[printed.index("{") :])

    return run
