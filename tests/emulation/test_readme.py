"""The example in the emulation's README, run as it stands there."""

from __future__ import annotations

import re
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest

import emulation
from emulation.build import Builder


def test_the_example_runs_and_its_fault_is_reported(
    builder: Builder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (Path(emulation.__file__).parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    # In this session's folder, which has the machine already.
    real = tempfile.TemporaryDirectory
    monkeypatch.setattr(
        tempfile,
        "TemporaryDirectory",
        lambda **options: real(**options) if options else nullcontext(builder.folder),
    )
    exec(compile(example, "README.md", "exec"), {"__name__": "example"})
    (printed,) = re.findall(r"```\n(reverse\.cu.*?)```", readme, re.DOTALL)
    assert capsys.readouterr().out == printed
