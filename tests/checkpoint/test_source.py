"""A source that changes while it is read is noticed, whatever the change does to hide."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import CheckpointError, MarlinqError
from marlinq.core.files import open_regular
from marlinq.operations.convert import convert
from marlinq.operations.quantize import quantize
from marlinq.operations.verify import verify
from tests.testing.original_folders import READ, save_tiny
from tests.testing.quantized_folders import model_tuples, write

NAME = "model.safetensors"


def rewritten(path: Path) -> None:
    """Another content of the same size, in place."""
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\1\2\3\4")


def rewritten_with_its_time_kept(path: Path) -> None:
    before = path.stat()
    rewritten(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    """Another file under the same name, with the same size and time."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    rewritten(other)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def removed(path: Path) -> None:
    path.unlink()


CHANGES = [rewritten, rewritten_with_its_time_kept, replaced, truncated, removed]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", "gptq", model_tuples())


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", [NAME, "config.json"])
def test_every_change_is_noticed(source: Path, change: Callable[[Path], None], name: str) -> None:
    opened = Checkpoint.open(source)
    opened.check_unchanged()
    state = opened.state()
    change(source / name)
    with pytest.raises(CheckpointError, match=rf"{name}: was (changed|replaced|removed) while it was read"):
        opened.check_unchanged()
    if name == NAME and change not in (truncated, removed):
        assert Checkpoint.open(source).state() != state


def test_a_rewritten_source_is_not_read_further(source: Path) -> None:
    opened = Checkpoint.open(source)
    rewritten_with_its_time_kept(source / NAME)
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        opened.tensor(next(iter(opened.tensors)))


class At:
    """Changes a file when an operation reports its n-th step."""

    def __init__(self, step: int, change: Callable[[Path], None], path: Path) -> None:
        self.left, self.change, self.path = step, change, path

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.left -= 1
        if self.left == 0:
            self.change(self.path)


@pytest.mark.parametrize("change", [rewritten_with_its_time_kept, replaced])
@pytest.mark.parametrize("step", [1, 20])
def test_a_conversion_of_a_source_that_changes_ends_in_an_error(
    source: Path, tmp_path: Path, change: Callable[[Path], None], step: int
) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="while it was read"):
        convert(source, out, target_format="awq", progress=At(step, change, source / NAME))
    assert not out.exists()
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "out.partial")
    if (tmp_path / "out.partial").exists():
        with pytest.raises(MarlinqError, match="another recipe, source or version"):
            convert(source, out, target_format="awq")


@pytest.mark.parametrize("change", [rewritten_with_its_time_kept, replaced])
def test_a_quantisation_of_a_source_that_changes_ends_in_an_error(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    model = save_tiny("llama", tmp_path / "model")
    with pytest.raises(CheckpointError, match="while it was read"):
        quantize(model, tmp_path / "out", recipe=READ, progress=At(5, change, model / NAME))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step", [1, 7, 15])
def test_a_verification_of_a_source_that_changes_fails(source: Path, step: int) -> None:
    report = verify(source, progress=At(step, rewritten_with_its_time_kept, source / NAME))
    assert not report.ok
    assert "was changed while it was read" in report.checks[-1].detail


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="named pipe, not a regular file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(OSError, match="a device"):
        open_regular("/dev/zero")
    with pytest.raises(OSError, match="a folder"):
        open_regular(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with pytest.raises(OSError, match="a symbolic link"):
        open_regular(tmp_path / "link", os.O_RDONLY | os.O_NOFOLLOW)
