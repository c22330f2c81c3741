from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_a_folder_of_the_same_name_is_not_taken_for_the_package(tmp_path: Path) -> None:
    # A clone is such a folder. It hides packages that are found only after Python's path has been searched,
    # as in environments that were not made by "make install": remove .venv then.
    (tmp_path / "marlinq").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", "import marlinq; print(marlinq.load)"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
