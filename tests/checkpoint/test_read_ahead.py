"""Reading ahead gives the bytes that reading one tensor after another gives, and notices the same faults."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from marlinq.checkpoint import Checkpoint, ReadAhead, lock_ring_early, read_ahead
from marlinq.core.errors import CheckpointError, EnvironmentProblem, UsageError
from tests.checkpoint.test_source import removed, replaced, rewritten_with_its_time_kept, truncated

CPU = torch.device("cpu")
NAME = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tensors of several dtypes below, at and above the size of a piece, and one of no elements."""
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 4096)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {
        "large": torch.randn(100, 333, generator=generator),
        "words": torch.randint(-(2**31), 2**31, (64, 128), generator=generator).to(torch.int32),
        "piece": torch.randn(2048, generator=generator).half(),
        "odd": torch.randint(0, 255, (4097,), generator=generator, dtype=torch.uint8),
        "scalar": torch.tensor(3.0).bfloat16(),
        "empty": torch.zeros(0, 7),
        "flags": torch.tensor([True, False, True]),
    }
    save_file(tensors, tmp_path / NAME)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def same(mine: Tensor, theirs: Tensor) -> bool:
    octets = (tensor.reshape(-1).view(torch.uint8) for tensor in (mine, theirs))
    return mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(*octets)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("budget", [0, 20_000, 1 << 30])
@pytest.mark.parametrize("backwards", [False, True])
def test_every_tensor_is_as_stored(folder: Path, threads: int, budget: int, backwards: bool) -> None:
    checkpoint = Checkpoint.open(folder)
    names = list(checkpoint.tensors)
    with ReadAhead(checkpoint, CPU, budget=budget, threads=threads) as reader:
        reader.expect(names)
        for name in reversed(names) if backwards else names:
            assert same(reader.tensor(name), checkpoint.tensor(name)), name
        # Asked for twice, or never said: read when asked for.
        assert same(reader.tensor("words"), checkpoint.tensor("words"))
        assert reader.seconds > 0
        assert reader.bytes_read == checkpoint.nbytes + checkpoint.tensors["words"].nbytes


def test_no_more_is_started_than_the_budget_allows(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    sizes = {name: info.nbytes for name, info in checkpoint.tensors.items()}
    names = sorted(sizes, key=lambda name: sizes[name])
    budget = sizes["piece"] + sizes["odd"]
    with ReadAhead(checkpoint, CPU, budget=budget) as reader:
        reader.expect(names)
        taken = 0
        for name in names:
            # Larger tensors than that are started when they are asked for.
            assert reader.bytes_read - taken <= budget
            reader.tensor(name)
            taken += sizes[name]
        assert reader.bytes_read == taken


def test_unknown_names_are_refused(folder: Path) -> None:
    with ReadAhead(Checkpoint.open(folder), CPU, budget=0) as reader:
        reader.expect(["nothing"])
        with pytest.raises(CheckpointError, match="no tensor named nothing"):
            reader.tensor("nothing")


def test_a_sparse_tensor_beyond_all_memory_ends_in_one_line(tmp_path: Path) -> None:
    size = 1 << 43
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    file = tmp_path / NAME
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + size)
    (tmp_path / "config.json").write_text("{}")
    with ReadAhead(Checkpoint.open(tmp_path), CPU, budget=0) as reader:
        reader.expect(["w"])
        with pytest.raises(EnvironmentProblem, match="cpu has too little memory for the tensors"):
            reader.tensor("w")


@pytest.mark.parametrize("change", [rewritten_with_its_time_kept, truncated])
def test_a_file_that_changes_is_not_read_on(folder: Path, change: Callable[[Path], None]) -> None:
    checkpoint = Checkpoint.open(folder)
    with ReadAhead(checkpoint, CPU, budget=0) as reader:
        change(folder / NAME)
        with pytest.raises(CheckpointError, match=r"was changed while it was read|ends early"):
            reader.tensor("large")


@pytest.mark.parametrize("change", [removed, replaced])
def test_the_file_that_was_opened_is_read(folder: Path, change: Callable[[Path], None]) -> None:
    """Another file under the same name is never read, and the end of the load notices it."""
    checkpoint = Checkpoint.open(folder)
    expected = checkpoint.tensor("large")
    with ReadAhead(checkpoint, CPU, budget=0) as reader:
        first = same(reader.tensor("large"), expected)
        change(folder / NAME)
        # Losing its last name changes the status of the open file, so nothing more is read of it.
        with pytest.raises(CheckpointError, match="was changed"):
            reader.tensor("words")
    assert first
    with pytest.raises(CheckpointError, match=r"was (changed|removed|replaced)"):
        checkpoint.check_unchanged()


def test_threads_end_with_an_error_and_settings_come_back(folder: Path) -> None:
    interval = sys.getswitchinterval()
    reader = ReadAhead(Checkpoint.open(folder), CPU, budget=1 << 30)

    def fail() -> None:
        with reader:
            reader.expect(reader.tensors)
            reader.tensor("nothing")

    with pytest.raises(CheckpointError):
        fail()
    assert sys.getswitchinterval() == interval
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("marlinq-read")]


@pytest.mark.parametrize("fails", [False, True])
def test_a_ring_is_locked_in_a_thread_for_the_device_that_is_named(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[tuple[torch.device, str]] = []

    def lock(device: torch.device) -> Tensor:
        locked.append((device, threading.current_thread().name))
        if fails:
            raise torch.OutOfMemoryError("no memory")
        return torch.empty(1)

    monkeypatch.setattr(read_ahead, "_locked", lock)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("auto", "cuda:3"):
        thread = lock_ring_early(name)
        assert thread is not None
        thread.join()
    assert [device.index for device, _ in locked] == [0, 3]
    assert {name for _, name in locked} == {"marlinq-lock-ring"}
    assert lock_ring_early("cpu") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lock_ring_early("auto") is None
    with pytest.raises(UsageError):
        lock_ring_early("abacus")
    assert len(locked) == 2
