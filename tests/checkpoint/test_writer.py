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
from marlinq.checkpoint.source import SourceFile
from marlinq.core.dtypes import dtype_name, torch_dtype
from marlinq.core.errors import CheckpointError, OutputError, UsageError

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
    """Bytes that an undisturbed run writes."""
    with writer(tmp_path / "reference") as target:
        fill(target)
        return contents(finish(target))


def test_the_root_is_no_place_for_a_folder() -> None:
    with pytest.raises(OutputError, match=r"^/: already exists; choose another output folder$"):
        check_place(Path("/"), resume=False)


@pytest.mark.parametrize("shard", [1, SHARD, 10**9])
def test_a_written_folder_is_read_by_us_and_by_safetensors(tmp_path: Path, shard: int) -> None:
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


@pytest.mark.parametrize("step", range(24))
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
        patched.setattr(os, "rename", counted(os.rename))
        patched.setattr(os, "unlink", counted(os.unlink))
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


def test_an_existing_folder_or_foreign_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # The same command is not advised again.
    monkeypatch.setattr("marlinq.core.command._started", ["marlinq quantize a b --resume"])
    with writer(tmp_path / "same") as target:
        fill(target, ["a.weight"])
        target.commit()
    monkeypatch.setattr("marlinq.core.command._started", ["marlinq quantize --resume a b"])
    with pytest.raises(OutputError, match="same command, but since then a file that it reads, "):
        writer(tmp_path / "same", fingerprint="other", resume=True)
    # Somebody else's run is told by its command line, as far as a message holds it.
    monkeypatch.setattr("marlinq.core.command._started", [f"marlinq quantize a b {'x' * 1000}"])
    with writer(tmp_path / "told"):
        pass
    monkeypatch.setattr("marlinq.core.command._started", ["marlinq quantize a b"])
    with pytest.raises(OutputError, match=r"to resume it \(marlinq quantize a b x{479}\), or"):
        writer(tmp_path / "told", fingerprint="other", resume=True)
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
def test_errors_of_the_file_system_are_one_line(
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


@pytest.mark.parametrize("name", [plan.name for plan in PLAN if 0 not in plan.shape])
@pytest.mark.parametrize("last", [False, True])
def test_a_changed_byte_of_what_is_taken_up_is_not_delivered(tmp_path: Path, name: str, last: bool) -> None:
    out = tmp_path / "out"
    with writer(out) as target:
        fill(target)
        target.commit()
        info = target.tensors[name]
    with (tmp_path / "out.partial" / info.shard).open("r+b") as file:
        file.seek(info.offset + (info.nbytes - 1 if last else 0))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with writer(out, resume=True) as target, pytest.raises(CheckpointError, match=f"{name} was changed"):
        finish(target)
    assert not out.exists()
    # Written anew, it is what it should be.
    with writer(out, resume=True) as target:
        fill(target, [name])
        finish(target)
    plan = next(plan for plan in PLAN if plan.name == name)
    assert torch.equal(Checkpoint.open(out).tensor(name), value(plan))


def test_a_changed_byte_of_what_was_kept_is_said(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as target:
        target.keep_json("text.json", [1, 2, 3])
        assert target.kept_json("text.json") == [1, 2, 3]
        assert target.kept_bytes("absent") is None
        path = target.partial / "text.json"
        path.write_bytes(path.read_bytes().replace(b"2", b"7"))
        with pytest.raises(OutputError, match=r"text\.json: is damaged; remove"):
            target.kept_json("text.json")
        # A digest that fits makes no JSON of it.
        target.keep_bytes("text.json", b"[" * 100_000)
        with pytest.raises(OutputError, match=r"text\.json: is damaged; remove"):
            target.kept_json("text.json")


HASH = "0" * 64
FORGED = {
    "unknown tensor": {"written": {"z": HASH}, "notes": {}},
    "no hash": {"written": {"a.weight": "abc"}, "notes": {}},
    "a number": {"written": {"a.weight": 7}, "notes": {}},
    "a list of pairs": {"written": [["a.weight", HASH]], "notes": {}},
    "notes of another kind": {"written": {}, "notes": [["calibration", 1]]},
    "no notes": {"written": {}},
}


def forged_line(entry: bytes) -> bytes:
    return hashlib.sha256(entry).hexdigest()[:16].encode() + b" " + entry + b"\n"


@pytest.mark.parametrize("kind", [*FORGED, "deep", "long number"])
def test_a_forged_journal_is_one_line(unfinished: Path, kind: str) -> None:
    entries = {
        "deep": b"[" * 1_000_000,
        "long number": b'{"written": {}, "notes": {"a": %s}}' % (b"9" * 5000),
    }
    entry = entries.get(kind) or json.dumps(FORGED[kind]).encode()
    with (unfinished / "journal.jsonl").open("ab") as file:
        file.write(forged_line(entry))
    with pytest.raises(OutputError, match="is damaged; remove") as caught:
        resume(unfinished)
    assert "\n" not in str(caught.value)


def test_a_huge_journal_is_one_line(unfinished: Path) -> None:
    os.truncate(unfinished / "journal.jsonl", 1 << 29)
    with pytest.raises(OutputError, match="has more than") as caught:
        resume(unfinished)
    assert "\n" not in str(caught.value)


def test_the_plan_is_kept(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as target:
        with pytest.raises(ValueError, match="planned"):
            target.write("a.weight", torch.zeros(3, 4, dtype=torch.float16))
        with pytest.raises(ValueError, match="planned"):
            target.write("z", torch.zeros(1))
        fill(target, ["a.weight"])
        with pytest.raises(ValueError, match="never written"):
            finish(target)


def fails(out: Path, work: str = "none", *, resume: bool = False) -> None:
    """A run that ends with an error after it did some ``work``."""
    with writer(out, resume=resume) as target:
        if work == "tensor":
            fill(target, ["a.weight"])
            target.commit()
        elif work == "copy":
            (out.parent / "source").write_bytes(bytes(24))
            target.copy("a.weight", SourceFile(out.parent / "source"), 0)
            target.commit()
        elif work == "note":
            target.commit({"calibration": 1})
        elif work == "text":
            target.keep_json("text.json", [1])
        elif work == "foreign":
            (target.partial / "mine.txt").write_text("precious")
        raise UsageError("wrong text")


@pytest.mark.parametrize("work", ["none", "copy"])
def test_an_error_before_there_is_work_leaves_no_folder(tmp_path: Path, work: str) -> None:
    with pytest.raises(UsageError, match="wrong text"):
        fails(tmp_path / "out", work)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("work", ["tensor", "note", "text", "foreign"])
def test_an_error_leaves_what_a_resumed_run_can_use(tmp_path: Path, work: str) -> None:
    with pytest.raises(UsageError, match="wrong text"):
        fails(tmp_path / "out", work)
    kept = contents(tmp_path / "out.partial")
    assert "journal.jsonl" in kept
    # A resumed run that fails takes nothing away, whatever it did.
    if work != "foreign":
        with pytest.raises(UsageError, match="wrong text"):
            fails(tmp_path / "out", resume=True)
        assert contents(tmp_path / "out.partial") == kept


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """``out.partial`` with one tensor written."""
    with writer(tmp_path / "out", shard=10**9) as target:
        fill(target, ["a.weight"])
        target.commit()
    return tmp_path / "out.partial"


def resume(folder: Path) -> CheckpointWriter:
    return writer(folder.with_name("out"), resume=True, shard=10**9)


def test_a_link_in_place_of_the_unfinished_folder_is_not_followed(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (tmp_path / "out.partial").symlink_to(foreign)
    with pytest.raises(OutputError, match="is not a folder, but a file or a link"):
        writer(tmp_path / "out", resume=True)
    (tmp_path / "out.partial").unlink()
    (tmp_path / "out.partial").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="is not a folder, but a file or a link"):
        writer(tmp_path / "out", resume=True)
    assert list(foreign.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "journal.jsonl"])
@pytest.mark.parametrize("hard", [False, True])
def test_a_link_in_the_unfinished_folder_is_not_followed(unfinished: Path, name: str, hard: bool) -> None:
    foreign = unfinished.with_name("precious")
    (unfinished / name).rename(foreign)
    before = foreign.read_bytes()
    if hard:
        (unfinished / name).hardlink_to(foreign)
    else:
        (unfinished / name).symlink_to(foreign)
    with pytest.raises(OutputError, match=rf"{name}: it (is a symbolic link|has another name elsewhere)"):
        resume(unfinished)
    assert foreign.read_bytes() == before


def test_a_link_where_a_shard_will_be_is_not_followed(tmp_path: Path, reference: dict[str, bytes]) -> None:
    """A folder with shards and without a journal: a run that was stopped as it began."""
    partial, foreign = tmp_path / "out.partial", tmp_path / "precious"
    partial.mkdir()
    foreign.write_text("precious")
    name = next(name for name in reference if name.startswith("model-"))
    (partial / name).symlink_to(foreign)
    with writer(tmp_path / "out", resume=True) as target:
        fill(target)
        assert contents(finish(target)) == reference
    assert foreign.read_text() == "precious"


@pytest.mark.parametrize("name", ["model.safetensors", "journal.jsonl"])
def test_a_named_pipe_in_the_unfinished_folder_is_not_waited_for(unfinished: Path, name: str) -> None:
    (unfinished / name).unlink()
    os.mkfifo(unfinished / name)
    with pytest.raises(OutputError, match=rf"{name}: it is a named pipe, not a regular file"):
        resume(unfinished)


def test_side_files_follow_no_links(tmp_path: Path) -> None:
    source, foreign = tmp_path / "source", tmp_path / "foreign"
    with writer(source, shard=10**9) as target:
        fill(target)
        finish(target)
    (source / "sub").mkdir()
    (source / "sub" / "vocab.txt").write_text("words")
    foreign.mkdir()
    with writer(tmp_path / "out", shard=10**9) as target:
        fill(target)
        (target.partial / "sub").symlink_to(foreign)
        opened = Checkpoint.open(source)
        with pytest.raises(OutputError, match="sub"):
            target.finish(config={}, manifest={}, side_files_from=opened)
        assert list(foreign.iterdir()) == []
        (target.partial / "sub").unlink()
        target.finish(config={}, manifest={}, side_files_from=opened)
    assert (tmp_path / "out" / "sub" / "vocab.txt").read_text() == "words"


def test_a_file_that_the_run_did_not_write_is_not_delivered(unfinished: Path) -> None:
    (unfinished / "modeling_evil.py").write_text("raise SystemExit")
    with resume(unfinished) as target:
        fill(target)
        with pytest.raises(OutputError, match=r"holds modeling_evil\.py, which no unfinished run"):
            finish(target)
    assert not unfinished.with_name("out").exists()


def test_a_folder_that_was_exchanged_is_not_delivered(unfinished: Path) -> None:
    with resume(unfinished) as target:
        fill(target)
        unfinished.rename(unfinished.with_name("elsewhere"))
        unfinished.mkdir()
        with pytest.raises(OutputError, match="was replaced while it was written"):
            finish(target)
    assert not unfinished.with_name("out").exists()


def test_a_changed_digit_in_the_journal_is_said(unfinished: Path) -> None:
    journal = unfinished / "journal.jsonl"
    text = journal.read_bytes()
    place = text.rindex(b'"', 0, text.rindex(b'"notes"')) - 5
    journal.write_bytes(
        text[:place] + (b"0" if text[place : place + 1] != b"0" else b"1") + text[place + 1 :]
    )
    with pytest.raises(OutputError, match="is damaged; remove"):
        resume(unfinished)


@pytest.mark.parametrize("place", [0, 20])
def test_a_shard_of_another_header_or_length_is_said(unfinished: Path, place: int) -> None:
    path = unfinished / "model.safetensors"
    before = path.read_bytes()
    path.write_bytes(before[:place] + b"#" + before[place + 1 :])
    with pytest.raises(OutputError, match=r"model\.safetensors: is damaged; remove"):
        resume(unfinished)
    path.write_bytes(before + b"x")
    with pytest.raises(OutputError, match=r"model\.safetensors: is damaged; remove"):
        resume(unfinished)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["unlink", "rename", "ftruncate", "write", "fsync", "mkdir"])
def test_errors_of_a_failing_disk_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes], code: int, call: str
) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    def run() -> None:
        with writer(tmp_path / "out", resume=True) as target:
            target.keep_json("calibration.json", [1])
            target.remove("calibration.json")
            fill(target)
            finish(target)

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        with pytest.raises(OutputError) as caught:
            run()
        assert "\n" not in str(caught.value)
    run()
    assert contents(tmp_path / "out") == reference


def test_a_journal_line_that_could_not_be_written_leaves_no_trace(
    unfinished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (unfinished / "journal.jsonl").read_bytes()
    with resume(unfinished) as target:
        fill(target, ["b.codes"])
        with monkeypatch.context() as patched:

            def half(descriptor: int, data: memoryview) -> int:
                real(descriptor, data[: len(data) // 2])
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

            real = os.write
            patched.setattr(os, "write", half)
            with pytest.raises(OutputError, match="free some room, then resume"):
                target.commit()
        assert (unfinished / "journal.jsonl").read_bytes() == before
        target.commit()
    with resume(unfinished) as target:
        assert target.written == {"a.weight", "b.codes"}


def test_half_of_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    config = {"model_type": "x", "odd\ud800": ["\udcff\n", "日"]}
    with writer(tmp_path / "out") as target:
        fill(target)
        target.finish(config=config, manifest={})
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8")) == config
