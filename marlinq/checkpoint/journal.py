"""The journal of an unfinished folder: which tensors are safely on disk, and what was noted with them.

Each line is a JSON object behind the first 16 digits of its SHA-256. The first names the run; every other one
holds hashes of tensors that were made durable before it was appended. A run that is killed leaves whole lines
and at most one torn one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marlinq.checkpoint.partial import PartialFolder
from marlinq.checkpoint.reader import CONFIG, MANIFEST
from marlinq.core.errors import OutputError

JOURNAL = "journal.jsonl"


def damaged(path: Path) -> OutputError:
    """A file of an unfinished folder is not what a run left there."""
    return OutputError(f"{path}: is damaged; remove {path.parent} and start over")


class Journal:
    """What one run, with those that it continues, has written.

    Args:
        folder: the unfinished folder.
        fingerprint: of the run.

    Attributes:
        hashes: SHA-256 by tensor. Never changed but replaced, since other threads may be looking at it.
        notes: JSON values that belong to what was written; replaced alike.
    """

    def __init__(self, folder: PartialFolder, fingerprint: str) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self.hashes: dict[str, str] = {}
        self.notes: dict[str, Any] = {}

    def begin(self) -> None:
        """Write the first line, for a run that starts."""
        self._append_line({"fingerprint": self._fingerprint})

    def append(self, written: Mapping[str, str], notes: Mapping[str, Any]) -> None:
        """Note tensors that are durable, by their hashes, and what belongs to them.

        Raises:
            OSError: the line can't be written; then nothing of it counts.
        """
        self._append_line({"written": written, "notes": notes})
        self.hashes = self.hashes | dict(written)
        self.notes = self.notes | dict(notes)

    def take_up(self) -> bool:
        """Continue what an unfinished run has noted; False when that run did not start one.

        Raises:
            OutputError: it belongs to another run, or is damaged.
        """
        data = self._folder.read(JOURNAL)
        if data is None:
            return self._take_up_manifest()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return False
        try:
            first, *rest = [_entry(line) for line in whole.splitlines()]
            self._check_fingerprint(first["fingerprint"])
            for line in rest:
                self.hashes.update(line["written"])
                self.notes.update(line["notes"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise damaged(self._folder.path / JOURNAL) from None
        if len(whole) < len(data):
            # A line torn by a kill: cut it off so that the next one starts clean.
            self._folder.truncate(JOURNAL, len(whole))
        return True

    def _take_up_manifest(self) -> bool:
        """Take up a run that was stopped between removing its journal and renaming its folder."""
        data = self._folder.read(MANIFEST)
        if data is None or self._folder.read(CONFIG) is None:
            return False
        try:
            manifest = json.loads(data)
            self._check_fingerprint(manifest["fingerprint"])
            self.hashes = dict(manifest["tensors"])
            self.notes = dict(manifest.get("run", {}))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise damaged(self._folder.path / MANIFEST) from None
        return True

    def _check_fingerprint(self, found: object) -> None:
        if found != self._fingerprint:
            raise OutputError(
                f"{self._folder.path}: belongs to a run with another recipe, source or version; "
                "repeat that command to resume it, or remove the folder"
            )

    def _append_line(self, line: Mapping[str, Any]) -> None:
        entry = json.dumps(line, separators=(",", ":")).encode()
        self._folder.append(JOURNAL, _check_sum(entry) + b" " + entry + b"\n")


def _entry(line: bytes) -> dict[str, Any]:
    """The value of one line.

    Raises:
        ValueError: it is not what was written.
    """
    check, _, entry = line.partition(b" ")
    if check != _check_sum(entry):
        raise ValueError("another check sum")
    value: dict[str, Any] = json.loads(entry)
    return value


def _check_sum(entry: bytes) -> bytes:
    return hashlib.sha256(entry).hexdigest()[:16].encode()
