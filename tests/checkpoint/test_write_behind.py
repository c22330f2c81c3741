"""Writing behind the work: the same folder as a plain run's, and no failure that goes unsaid."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from marlinq.checkpoint import Checkpoint, CheckpointWriter, CopyBehind, TensorPlan, WriteBehind
from marlinq.core.errors import CheckpointError, NumericsError, OutputError
from marlinq.core.progress import no_progress

CPU = torch.device("cpu")
TENSORS = {
    "a": torch.arange(70_000, dtype=torch.int32),
    "b": torch.randn(3, 5).half(),
    "c": torch.zeros(0, 4),
    "d": torch.tensor(7, dtype=torch.int64),
}
DTYPES = {torch.int32: "int32", torch.float16: "float16", torch.float32: "float32", torch.int64: "int64"}
PLAN = [TensorPlan(name, DTYPES[found.dtype], tuple(found.shape)) for name, found in TENSORS.items()]


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(TENSORS, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[CheckpointWriter]:
    with CheckpointWriter(tmp_path / "out", PLAN, fingerprint="run", max_shard_bytes=1000) as found:
        yield found


def check(folder: Path) -> None:
    found = Checkpoint.open(folder)
    for name, expected in TENSORS.items():
        assert torch.equal(found.tensor(name), expected), name


@pytest.mark.parametrize("obstacle", [None, errno.EXDEV, errno.ENOSYS])
def test_copies_are_what_writing_gives(
    source: Checkpoint, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch, obstacle: int | None
) -> None:
    # Pieces smaller than a tensor, of which the system copies only a part at a time.
    monkeypatch.setattr("marlinq.checkpoint.writer._COPY_BYTES", 1 << 16)
    real = os.copy_file_range

    def partly(*args: int) -> int:
        if obstacle is not None:
            raise OSError(obstacle, os.strerror(obstacle))
        return real(args[0], args[1], min(args[2], 1000), *args[3:])

    monkeypatch.setattr(os, "copy_file_range", partly)
    steps: list[tuple[int, int]] = []
    with CopyBehind(
        source, writer, TENSORS, lambda stage, done, total: steps.append((done, total))
    ) as copying:
        copying.finish()
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert writer.written == set(TENSORS)
    for name, expected in TENSORS.items():
        # Against the hash, which is of the bytes that were read.
        assert torch.equal(writer.read_back(name), expected)
    check(writer.finish(config={}, manifest={}))


def test_written_tensors_are_not_copied_again(source: Checkpoint, writer: CheckpointWriter) -> None:
    for name in ("a", "b"):
        writer.write(name, TENSORS[name])
    writer.commit()
    steps: list[int] = []
    with CopyBehind(source, writer, TENSORS, lambda stage, done, total: steps.append(total)) as copying:
        copying.finish()
    assert steps == [2, 2]
    check(writer.finish(config={}, manifest={}))


def test_a_source_that_changes_is_noticed(source: Checkpoint, writer: CheckpointWriter) -> None:
    path = source.path / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with (
        pytest.raises(CheckpointError, match="was changed while it was read"),
        CopyBehind(source, writer, TENSORS, no_progress) as copying,
    ):
        copying.finish()


def test_a_disk_that_refuses_a_copy_is_said(
    source: Checkpoint, writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    with (
        pytest.raises(OutputError, match="No space left on device"),
        CopyBehind(source, writer, TENSORS, no_progress) as copying,
    ):
        copying.finish()


def test_lots_are_written_in_order_with_their_notes(writer: CheckpointWriter) -> None:
    with WriteBehind(writer, CPU) as behind:
        for name, tensor in TENSORS.items():
            behind.write({name: tensor}, {"last": name})
    assert writer.written == set(TENSORS)
    assert writer.notes == {"last": "d"}
    check(writer.finish(config={}, manifest={}))


def test_tensors_of_a_lot_are_written_side_by_side(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(len(TENSORS), timeout=30)
    write = CheckpointWriter.write

    def meeting(self: CheckpointWriter, name: str, tensor: torch.Tensor) -> None:
        together.wait()
        write(self, name, tensor)

    monkeypatch.setattr(CheckpointWriter, "write", meeting)
    with WriteBehind(writer, CPU) as behind:
        behind.write(TENSORS, {"all": True})
    assert writer.written == set(TENSORS)
    check(writer.finish(config={}, manifest={}))


def fail_to_write_b(monkeypatch: pytest.MonkeyPatch) -> None:
    write = CheckpointWriter.write

    def failing(self: CheckpointWriter, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            raise OutputError("the disk is gone")
        write(self, name, tensor)

    monkeypatch.setattr(CheckpointWriter, "write", failing)


def test_a_lot_of_which_a_part_fails_is_not_noted(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_write_b(monkeypatch)
    with pytest.raises(OutputError, match="the disk is gone"), WriteBehind(writer, CPU) as behind:
        behind.write(TENSORS, {"all": True})
    assert writer.notes == {}
    assert "b" not in writer.written


def test_work_waits_while_two_lots_are_under_way(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, handed = threading.Event(), []
    write = CheckpointWriter.write

    def slowly(self: CheckpointWriter, name: str, tensor: torch.Tensor) -> None:
        assert go.wait(30)
        write(self, name, tensor)

    monkeypatch.setattr(CheckpointWriter, "write", slowly)

    def work() -> None:
        with WriteBehind(writer, CPU) as behind:
            for name, tensor in TENSORS.items():
                behind.write({name: tensor}, {})
                handed.append(name)

    worker = threading.Thread(target=work)
    worker.start()
    worker.join(0.3)
    assert handed == ["a", "b"]
    go.set()
    worker.join(30)
    assert writer.written == set(TENSORS)


def test_a_failure_reaches_the_work_and_what_was_whole_stays(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_write_b(monkeypatch)

    def write_all() -> None:
        with WriteBehind(writer, CPU) as behind:
            for name, tensor in TENSORS.items():
                behind.write({name: tensor}, {})

    with pytest.raises(OutputError, match="the disk is gone"):
        write_all()
    assert "a" in writer.written
    assert "b" not in writer.written


def test_threads_commit_beside_each_other(writer: CheckpointWriter, source: Checkpoint) -> None:
    with WriteBehind(writer, CPU) as behind, CopyBehind(source, writer, ["a", "b"], no_progress) as copying:
        behind.write({"c": TENSORS["c"]}, {"n": 1})
        behind.write({"d": TENSORS["d"]}, {"n": 2})
        behind.wait()
        copying.finish()
    assert writer.written == set(TENSORS)
    check(writer.finish(config={}, manifest={}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_copies_that_should_be_finite_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setattr("marlinq.checkpoint.writer._COPY_BYTES", 64)
    tensors = {"a": torch.ones(50, dtype=torch.bfloat16), "n": torch.arange(9), "z": torch.zeros(0)}
    tensors["a"][[3, 40]] = value
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    save_file(tensors, source / "model.safetensors")
    checkpoint = Checkpoint.open(source)
    plans = [TensorPlan(name, info.dtype, info.shape) for name, info in checkpoint.tensors.items()]
    for finite in (False, True):
        with CheckpointWriter(tmp_path / f"out-{finite}", plans, fingerprint="x") as writer:
            copying = CopyBehind(checkpoint, writer, tensors, no_progress, finite=tensors if finite else ())
            refused = pytest.raises(NumericsError, match=r"a: 1 of the first 32 weights are NaN or infinite")
            with refused if finite else nullcontext(), copying:
                copying.finish()
            assert ("a" in writer.written) is not finite
