"""Folders that are written: whole or not there, resumed after any interruption, with the same bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from marlinq.checkpoint import MANIFEST, Checkpoint, CheckpointWriter, TensorPlan, check_place
from marlinq.core.dtypes import dtype_name, torch_dtype
from marlinq.core.errors import CheckpointError, OutputError

PLAN = [
    TensorPlan("a.weight", "float16", (4, 3)),
    TensorPlan("b.codes", "int32", (5,)),
    TensorPlan("c.weight", "bfloat16", (2, 2, 2)),
    TensorPlan("d.scalar", "int64", ()),
    TensorPlan("e.empty", "float32", (0, 3)),
]
SHARD = 48


def value(plan: TensorPlan) -> torch.Tensor:
    count = 1
    for size in plan.shape:
        count *= size
    return (torch.arange(count) * 3 + 1).to(torch_dtype(plan.dtype)).reshape(plan.shape)


def writer(
    out: Path, *, fingerprint: str = "run", resume: bool = False, shard: int = SHARD
) -> CheckpointWriter:
    return CheckpointWriter(out, PLAN, fingerprint=fingerprint, max_shard_bytes=shard, resume=resume)


def fill(target: CheckpointWriter, names: list[str] | None = None) -> None:
    for plan in PLAN:
        if names is None or plan.name in names:
            target.write(plan.name, value(plan))


def finish(target: CheckpointWriter) -> Path:
    return target.finish(config={"model_type": "x"}, manifest={"tool": "t"})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def reference(tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    with writer(tmp_path / "reference") as target:
        fill(target)
        return contents(finish(target))


@pytest.mark.parametrize("shard", [1, SHARD, 10**9])
def test_what_was_written_is_read_back_by_us_and_by_safetensors(tmp_path: Path, shard: int) -> None:
    out = tmp_path / "out"
    with writer(out, shard=shard) as target:
        fill(target)
        assert not out.exists()
        assert finish(target) == out
    opened = Checkpoint.open(out)
    assert set(opened.tensors) == {plan.name for plan in PLAN}
    for plan in PLAN:
        assert torch.equal(opened.tensor(plan.name), value(plan))
        theirs = load_file(out / opened.tensors[plan.name].shard)[plan.name]
        assert dtype_name(theirs.dtype) == plan.dtype
        assert torch.equal(theirs, value(plan))
    for name in opened.shards:
        assert sum(info.nbytes for info in opened.tensors.values() if info.shard == name) <= max(shard, 24)
    hashes = json.loads((out / MANIFEST).read_text())["tensors"]
    for plan in PLAN:
        data = value(plan).reshape(-1).view(torch.uint8).numpy().tobytes() if value(plan).numel() else b""
        assert hashes[plan.name] == hashlib.sha256(data).hexdigest()
    assert not (tmp_path / "out.partial").exists()


def test_an_unfinished_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as target:
        fill(target)
        target.commit()
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "out.partial")


def test_order_does_not_change_the_bytes(tmp_path: Path, reference: dict[str, bytes]) -> None:
    with writer(tmp_path / "out") as target:
        for plan in reversed(PLAN):
            target.write(plan.name, value(plan))
            target.commit()
        assert contents(finish(target)) == reference


@pytest.mark.parametrize(
    "committed", [[], ["a.weight"], ["a.weight", "c.weight"], [plan.name for plan in PLAN]]
)
def test_a_resumed_run_gives_the_same_bytes(
    tmp_path: Path, reference: dict[str, bytes], committed: list[str]
) -> None:
    out = tmp_path / "out"
    with writer(out) as target:
        fill(target, committed)
        target.commit()
        if "b.codes" not in committed:
            # Written but not committed: a kill here loses it.
            target.write("b.codes", torch.zeros(5, dtype=torch.int32))
    with writer(out, resume=True) as target:
        assert target.written == set(committed)
        for name in committed:
            planned = next(plan for plan in PLAN if plan.name == name)
            assert torch.equal(target.read_back(name), value(planned))
        fill(target, [plan.name for plan in PLAN if plan.name not in target.written])
        assert contents(finish(target)) == reference


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_journal_line_is_dropped(tmp_path: Path, reference: dict[str, bytes], cut: int) -> None:
    out = tmp_path / "out"
    with writer(out) as target:
        fill(target, ["a.weight"])
        target.commit()
        fill(target, ["b.codes"])
        target.commit()
    journal = tmp_path / "out.partial" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-cut])
    with writer(out, resume=True) as target:
        assert target.written == {"a.weight"}
        fill(target, [plan.name for plan in PLAN if plan.name not in target.written])
        assert contents(finish(target)) == reference


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


@pytest.mark.parametrize("step", range(12))
def test_a_kill_between_any_two_steps_of_finishing(
    tmp_path: Path, reference: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The n-th call that changes the folder never happens; the repeated run ends in the same bytes."""
    out, left = tmp_path / "out", step

    def counted(function):  # type: ignore[no-untyped-def]
        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(*args, **kwargs)

        return call

    killed = False
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", counted(Path.rename))
        patched.setattr(Path, "unlink", counted(Path.unlink))
        patched.setattr(os, "fsync", counted(os.fsync))
        try:
            with writer(out) as target:
                fill(target)
                finish(target)
        except Killed:
            killed = True
    if out.exists():
        assert contents(out) == reference
        return
    assert killed
    with writer(out, resume=True) as target:
        fill(target, [plan.name for plan in PLAN if plan.name not in target.written])
        assert contents(finish(target)) == reference
    assert not (tmp_path / "out.partial").exists()


def test_two_writers_exclude_each_other(tmp_path: Path) -> None:
    with (
        writer(tmp_path / "out"),
        pytest.raises(OutputError, match="another process is writing it"),
    ):
        writer(tmp_path / "out", resume=True)


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(OutputError, match="already exists"):
        writer(out)
    out.rmdir()
    with writer(out) as target:
        fill(target, ["a.weight"])
        target.commit()
    with pytest.raises(OutputError, match="an unfinished run is here"):
        writer(out)
    with pytest.raises(OutputError, match="another recipe, source or version"):
        writer(out, fingerprint="other", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can't be created"):
        writer(tmp_path / "file" / "out")


def test_the_place_is_judged_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (tmp_path / "link").symlink_to(source)
    for inside in (source / "out", source / "new" / "out", tmp_path / "link" / "out"):
        with pytest.raises(OutputError, match="lies inside"):
            check_place(inside, resume=False, source=source)
    check_place(tmp_path / "source-out", resume=False, source=source)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="already exists"):
        check_place(tmp_path / "dangling", resume=False)
    with pytest.raises(OutputError, match="already exists"):
        check_place(Path(), resume=False)
    (tmp_path / "out.partial").write_text("")
    with pytest.raises(OutputError, match="is not a folder"):
        check_place(tmp_path / "out", resume=True)
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(OutputError, match="no permission to write in"):
        check_place(tmp_path / "new" / "other", resume=False)
    with pytest.raises(OutputError, match="can't be created"):
        writer(source / ("a" * 300))


def test_a_foreign_folder_is_not_taken_over(tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "notes.txt").write_text("precious")
    with pytest.raises(OutputError, match=r"holds notes\.txt"):
        writer(tmp_path / "out", resume=True)
    assert contents(partial) == {"notes.txt": b"precious"}


@pytest.mark.parametrize("journal", [b"", b'{"finger'])
def test_a_run_that_was_stopped_before_its_first_journal_line_starts_afresh(
    tmp_path: Path, reference: dict[str, bytes], journal: bytes
) -> None:
    with writer(tmp_path / "out"):
        pass
    path = tmp_path / "out.partial" / "journal.jsonl"
    path.write_bytes(journal)
    for commit in (True, False):
        with writer(tmp_path / "out", resume=True) as target:
            # The second time there is a whole journal to take up.
            assert target.resumed is not commit
            fill(target, [plan.name for plan in PLAN if plan.name not in target.written])
            if commit:
                target.commit()
            else:
                assert contents(finish(target)) == reference


@pytest.mark.parametrize("journal", [b"garbage\n", b"[]\n", b"{}\n", b'{"fingerprint":"run"}\n[1]\n'])
def test_a_damaged_journal_is_said(tmp_path: Path, journal: bytes) -> None:
    with writer(tmp_path / "out"):
        pass
    (tmp_path / "out.partial" / "journal.jsonl").write_bytes(journal)
    with pytest.raises(OutputError, match="is damaged; remove"):
        writer(tmp_path / "out", resume=True)


@pytest.mark.parametrize("manifest", ["garbage", "{}", '{"fingerprint": "run"}'])
def test_a_damaged_manifest_of_a_finished_folder_is_said(tmp_path: Path, manifest: str) -> None:
    with writer(tmp_path / "out") as target:
        fill(target)
        finish(target)
    partial = (tmp_path / "out").rename(tmp_path / "out.partial")
    with pytest.raises(OutputError, match="another recipe, source or version"):
        writer(tmp_path / "out", fingerprint="other", resume=True)
    (partial / MANIFEST).write_text(manifest)
    with pytest.raises(OutputError, match="is damaged; remove"):
        writer(tmp_path / "out", resume=True)


@pytest.mark.parametrize("call", ["fsync", "open"])
def test_what_the_system_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes], call: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(OutputError, match="Operation not permitted; mend that, then resume"):
            writer(tmp_path / "out")
    with writer(tmp_path / "out", resume=True) as target:
        fill(target)
        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse)
            with pytest.raises(OutputError, match="Operation not permitted; mend that, then resume"):
                finish(target)
        assert contents(finish(target)) == reference


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with writer(out) as target:
        fill(target)
        out.mkdir()
        (out / "mine").write_text("precious")
        with pytest.raises(OutputError, match="appeared while"):
            finish(target)
    assert contents(out) == {"mine": b"precious"}


def test_a_full_disk_is_said_before_and_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore[attr-defined]
        with pytest.raises(OutputError, match=r"needs 0\.0 MB, the disk has 0\.0 MB free"):
            writer(out)
    assert list(tmp_path.iterdir()) == []
    with writer(out) as target:
        with monkeypatch.context() as patched:

            def full(*args: object) -> int:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

            patched.setattr(os, "pwrite", full)
            with pytest.raises(OutputError, match="No space left on device; free some room, then resume"):
                fill(target)
        fill(target)
        finish(target)
    assert out.exists()


def test_changed_bytes_are_not_read_back(tmp_path: Path) -> None:
    with writer(tmp_path / "out", shard=10**9) as target:
        fill(target)
        target.commit()
        info = target.tensors["a.weight"]
        with (tmp_path / "out.partial" / info.shard).open("r+b") as file:
            file.seek(info.offset)
            file.write(b"\xff")
        with pytest.raises(CheckpointError, match=r"a\.weight was changed"):
            target.read_back("a.weight")


def test_the_plan_is_kept(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as target:
        with pytest.raises(ValueError, match="planned"):
            target.write("a.weight", torch.zeros(3, 4, dtype=torch.float16))
        with pytest.raises(ValueError, match="planned"):
            target.write("z", torch.zeros(1))
        fill(target, ["a.weight"])
        with pytest.raises(ValueError, match="never written"):
            finish(target)
