"""Faults that make a tree unfit for release are seen, and this tree's page and Dockerfile are fit."""

from __future__ import annotations

import importlib.util
import io
import re
import tarfile
from email.message import Message
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def release_check() -> ModuleType:
    specification = importlib.util.spec_from_file_location("release_check", ROOT / "scripts/release_check.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def metadata(description: str, **fields: str) -> Message:
    message = Message()
    known = {
        "Author": "The marlinq authors",
        "License-Expression": "Apache-2.0",
        "Summary": "x",
        "Description-Content-Type": "text/markdown",
    }
    for key, value in (known | fields).items():
        if value:
            message[key] = value
    message.set_payload(description)
    return message


def test_a_good_description_passes(release_check: ModuleType) -> None:
    assert release_check.metadata_faults(metadata("[a](https://example.org)")) == []


def test_the_package_page_has_no_relative_links(release_check: ModuleType) -> None:
    page = (ROOT / "docs" / "package-page.md").read_text(encoding="utf-8")
    assert release_check.metadata_faults(metadata(page)) == []


def test_relative_links_and_missing_fields_are_named(release_check: ModuleType) -> None:
    told = release_check.metadata_faults(metadata("![plot](docs/plot.svg)", Author=""))
    assert told == [
        "the metadata has no Author",
        "the description has a relative link or image: docs/plot.svg",
    ]


def test_tests_in_a_source_archive_are_named(release_check: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "marlinq-0.1.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ("LICENSE", "pyproject.toml", "marlinq/__init__.py", "tests/test_toys.py"):
            archive.addfile(tarfile.TarInfo(f"marlinq-0.1/{name}"), io.BytesIO())
    assert release_check.source_faults(path) == ["marlinq-0.1.tar.gz has tests/test_toys.py"]


def test_the_dockerfile_copies_files_that_exist_and_runs_without_root() -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    instructions = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    for name, *words in instructions:
        if name == "COPY":
            assert [source for source in words[:-1] if not (ROOT / source).exists()] == []
    names = [instruction[0] for instruction in instructions]
    assert names[0] == "FROM"
    assert names.index("USER") < names.index("ENTRYPOINT")
    # An image by name alone would change under a release.
    assert re.fullmatch(r"python:3\.1[123]-slim-\w+", instructions[0][1])
