"""Packages that a command does not use are hidden while it imports, and nothing of that stays."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from marlinq.cli import lean_imports


def imported(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def test_packages_are_hidden_inside_and_back_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large_package.py").touch()
    (tmp_path / "used_package.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert imported("used_package")
    with lean_imports.lean_imports(hide=("large_package", "used_package", "absent_package")):
        assert importlib.util.find_spec("large_package") is None
        assert not imported("large_package")
        assert imported("used_package"), "a package that is imported already stays"
    assert imported("large_package")
    assert importlib.util.find_spec("absent_package") is None
    for name in ("large_package", "used_package"):
        del sys.modules[name]


def test_file_lists_are_read_for_other_names_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    every = importlib.metadata.packages_distributions()
    reads: list[int] = []

    def counted() -> Mapping[str, list[str]]:
        reads.append(1)
        return every

    monkeypatch.setattr(lean_imports, "_packages_distributions", counted)
    with lean_imports.lean_imports():
        names = importlib.metadata.packages_distributions()
        assert names["torch"] == every["torch"] == ["torch"]
        assert names.get("huggingface_hub") == every["huggingface_hub"]
        assert not reads
        assert names["yaml"] == every["yaml"] == ["PyYAML"]
        assert names.get("no_such_package", []) == []
        assert dict(names) == dict(every)
        assert reads == [1]
    assert importlib.metadata.packages_distributions is counted
