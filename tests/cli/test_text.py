"""Options that name a text are looked at before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("arguments", [["quantize", ".", "b", "--calibration"], ["eval", ".", "--text"]])
def test_a_text_that_is_not_there_is_told_at_once(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys\n"
        "from marlinq.cli import main\n"
        "try:\n"
        f"    main({[*arguments, 'nosuch.txt']!r})\n"
        "finally:\n"
        "    print([name for name in ('torch', 'datasets', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert run.returncode == 2
    assert run.stdout == "[]\n"
    assert run.stderr.startswith("error: text nosuch.txt: no such file, and not a dataset as NAME")
    assert run.stderr.count("\n") == 1
