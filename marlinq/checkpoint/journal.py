"""The journal of an unfinished folder: hashes of the tensors that are durably on disk, and notes.

Each line is a JSON object behind the first 16 hexadecimal digits of its SHA-256. The first line
has the fingerprint of the run and the command line that started it. Every other line has hashes of tensors
that were durable before the line was appended. A killed run leaves whole lines and at most one incomplete
last line.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from marlinq.checkpoint.partial import PartialFolder
from marlinq.checkpoint.reader import CONFIG, MANIFEST
from marlinq.core.command import command_line
from marlinq.core.errors import OutputError
from marlinq.core.plain_values import load_json

JOURNAL = "journal.jsonl"
_SHOWN = 500
"""characters of another run's command line in a message, at most"""
_SHA256 = re.compile("[0-9a-f]{64}")
_MOST_BYTES = 1 << 28
"""Bytes of a journal at most; it has less than 1 KB for each tensor."""


def damaged(path: Path) -> OutputError:
    """The error for a file of an unfinished folder that is not as a run left it."""
    return OutputError(f"{path}: is damaged; remove {path.parent} and start over")


def _mismatch(command: object) -> str:
    """Why a run can't continue one of another fingerprint, from the command line that the journal names."""
    now = command_line()
    if now is not None and isinstance(command, str) and _without_resume(command) == _without_resume(now):
        return (
            "belongs to the same command, but since then a file that it reads, the current folder, the "
            "device, the number of CPU threads or the version of a package changed; undo that, or remove "
            "the folder"
        )
    shown = f" ({command[:_SHOWN]})" if isinstance(command, str) else ""
    return (
        "belongs to a run with another recipe, source or version, or on a CPU with another number of "
        f"threads; repeat that command to resume it{shown}, or remove the folder"
    )


def _without_resume(command: str) -> str:
    return command.replace(" --resume", "")


class Journal:
    """Hashes and notes of a run and of the interrupted runs that it continues.

    Args:
        folder: the unfinished folder.
        fingerprint: fingerprint of the run.

    Attributes:
        hashes: SHA-256 of durable tensors by name. Replaced, never mutated, since other threads may read it.
        notes: JSON values that were committed with tensors, by name; replaced, never mutated.
    """

    def __init__(self, folder: PartialFolder, fingerprint: str) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self.hashes: dict[str, str] = {}
        self.notes: dict[str, Any] = {}

    def begin(self) -> None:
        """Write the first line of a new journal."""
        self._append_line({"fingerprint": self._fingerprint, "command": command_line()})

    def append(self, written: Mapping[str, str], notes: Mapping[str, Any]) -> None:
        """Append a line with hashes of durable tensors, and notes.

        Raises:
            OSError: the line can't be written; the journal is then unchanged.
        """
        self._append_line({"written": written, "notes": notes})
        self.hashes = self.hashes | dict(written)
        self.notes = self.notes | dict(notes)

    def take_up(self, names: Container[str]) -> bool:
        """Read the journal of an interrupted run; False where it has none.

        Args:
            names: the tensors that the run may have written.

        Raises:
            OutputError: the journal belongs to another run, or is damaged.
        """
        data = self._folder.read(JOURNAL, _MOST_BYTES)
        if data is None:
            return self._take_up_manifest(names)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return False
        try:
            first, *rest = [_entry(line) for line in whole.splitlines()]
            self._check_fingerprint(first["fingerprint"], first.get("command"))
            for line in rest:
                self.hashes |= _hashes(line["written"], names)
                self.notes |= _notes(line["notes"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise damaged(self._folder.path / JOURNAL) from None
        if len(whole) < len(data):
            # Remove an incomplete last line, which a killed run left.
            self._folder.truncate(JOURNAL, len(whole))
        return True

    def _take_up_manifest(self, names: Container[str]) -> bool:
        """Read the manifest instead, where a run was stopped between removing its journal and renaming its
        folder."""
        data = self._folder.read(MANIFEST, _MOST_BYTES)
        if data is None or self._folder.read(CONFIG) is None:
            return False
        try:
            manifest = load_json(data)
            self._check_fingerprint(manifest["fingerprint"])
            self.hashes = _hashes(manifest["tensors"], names)
            self.notes = _notes(manifest.get("run", {}))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise damaged(self._folder.path / MANIFEST) from None
        return True

    def _check_fingerprint(self, found: object, command: object = None) -> None:
        if found != self._fingerprint:
            raise OutputError(f"{self._folder.path}: {_mismatch(command)}")

    def _append_line(self, line: Mapping[str, Any]) -> None:
        entry = json.dumps(line, separators=(",", ":")).encode()
        self._folder.append(JOURNAL, _check_sum(entry) + b" " + entry + b"\n")


def _hashes(value: object, names: Container[str]) -> dict[str, str]:
    """``value`` as SHA-256 by tensor, each one of ``names``.

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(value, dict):
        raise ValueError("no object")
    for name, digest in value.items():
        if name not in names or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise ValueError("no hash of a planned tensor")
    return value


def _notes(value: object) -> dict[str, Any]:
    """``value`` as notes by their names.

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _entry(line: bytes) -> dict[str, Any]:
    """The value of one line.

    Raises:
        ValueError: it is not what was written.
    """
    check, _, entry = line.partition(b" ")
    if check != _check_sum(entry):
        raise ValueError("another check sum")
    value: dict[str, Any] = load_json(entry)
    return value


def _check_sum(entry: bytes) -> bytes:
    return hashlib.sha256(entry).hexdigest()[:16].encode()
