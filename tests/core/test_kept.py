"""Kept files: whose folder is trusted, what is read, and what an interrupted process leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from marlinq.core import kept
from marlinq.core.errors import EnvironmentProblem
from marlinq.core.kept import UntrustedCache, is_kept, read_kept, read_note, write_kept, write_note

NOBODY = 65_534


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path / "cache"))
    kept._remove_stale.cache_clear()
    return tmp_path / "cache" / "kernels"


def test_a_written_value_is_read_back(folder: Path) -> None:
    assert read_kept("a", 10) is None
    assert not is_kept("a")
    assert write_kept("a", b"content") == folder / "a"
    assert read_kept("a", 10) == b"content"
    assert is_kept("a")
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_no_umask_makes_a_folder_that_is_refused(folder: Path) -> None:
    before = os.umask(0)
    try:
        write_kept("a", b"")
    finally:
        os.umask(before)
    assert read_kept("a", 0) == b""


@pytest.mark.parametrize("part", [".", ".."], ids=["itself", "the folder above"])
@pytest.mark.parametrize("mode", [0o777, 0o702])
def test_a_folder_that_others_can_write_is_refused(folder: Path, part: str, mode: int) -> None:
    write_kept("a", b"")
    open_to_all = (folder / part).resolve()
    open_to_all.chmod(mode)
    for use in (lambda: read_kept("a", 10), lambda: write_kept("a", b"other")):
        with pytest.raises(EnvironmentProblem, match=f"^{open_to_all}: .*chmod go-w .*MARLINQ_CACHE"):
            use()
    with pytest.warns(UntrustedCache, match=f"{open_to_all}: others can write"):
        assert read_note("a") is None
    write_note("b", b"")
    assert not is_kept("a")
    assert not (folder / "b").exists()
    open_to_all.chmod(0o755)
    assert read_kept("a", 10) == b""


def test_a_group_may_write_that_holds_its_owner_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kept("a", b"")
    folder.chmod(0o770)
    monkeypatch.setattr(kept, "_is_private", lambda group, user: True)
    assert read_kept("a", 10) == b""
    monkeypatch.setattr(kept, "_is_private", lambda group, user: False)
    with pytest.raises(EnvironmentProblem, match="others can write there"):
        read_kept("a", 10)


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kept("a", b"")
    owner = folder.stat().st_uid
    stat = Path.stat

    def as_nobody(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        if path.name != "kernels":
            return found
        return os.stat_result((*found[:4], NOBODY, *found[5:]))

    monkeypatch.setattr(Path, "stat", as_nobody)
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    with pytest.raises(EnvironmentProblem, match=f"kernels: belongs to user {NOBODY}"):
        read_kept("a", 10)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 << 30)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_pipe, "named pipe"),
        (_socket, "socket"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "symbolic link"),
        (_sparse, "more than 10 bytes"),
        (lambda path: path.write_bytes(bytes(11)), "more than 10 bytes"),
        (lambda path: (path.touch(), path.chmod(0o666)), "others can write it"),
    ],
)
def test_only_small_regular_files_are_read(
    folder: Path, make: Callable[[Path], object], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(parents=True)
    # A path of a socket has at most 108 bytes.
    monkeypatch.chdir(folder)
    make(Path("a"))
    with pytest.raises(OSError, match=problem):
        read_kept("a", 10)


def test_a_user_without_a_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MARLINQ_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with pytest.raises(EnvironmentProblem, match="no home folder; set MARLINQ_CACHE"):
        read_kept("a", 10)
    with pytest.warns(UntrustedCache, match="no home folder"):
        assert read_note("a") is None


def test_a_path_that_is_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLINQ_CACHE", "/" + "a/" * 4_000)
    with pytest.raises(EnvironmentProblem, match="File name too long"):
        read_kept("a", 10)


def test_temporary_files_of_killed_processes_go(folder: Path) -> None:
    folder.mkdir(parents=True)
    old, new = folder / "a.1234.tmp", folder / "b.5678.tmp"
    for path in (old, new):
        path.touch()
    os.utime(old, (time.time() - 7_200,) * 2)
    write_kept("a", b"")
    assert sorted(path.name for path in folder.iterdir()) == ["a", "b.5678.tmp"]


def test_processes_take_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The lock belongs to an open folder: a second one of the same process has to wait as another process has.
    with kept.one_process_at_a_time():
        monkeypatch.setattr(kept, "_MOST_WAIT_SECONDS", 0.01)
        descriptor = os.open(folder, os.O_RDONLY)
        assert not kept._locked(descriptor)
        # After the longest wait it goes on without the lock.
        with kept.one_process_at_a_time():
            pass
    assert kept._locked(descriptor)
    os.close(descriptor)


@pytest.mark.parametrize("fault", ["flock", "open"])
def test_without_locks_nobody_waits(folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl if fault == "flock" else os, fault, fails)
    with kept.one_process_at_a_time():
        pass
