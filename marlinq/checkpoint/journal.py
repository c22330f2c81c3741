"""The journal of an unfinished folder: which tensors are safely on disk, and what was noted with them.

Each line is a JSON object behind the first 16 digits of its SHA-256. The first names the run; every other one
holds hashes of tensors that were made durable before it was appended. A run that is killed leaves whole lines
and at most one torn one.
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
from marlinq.core.errors import OutputError
from marlinq.core.plain_values import load_json

JOURNAL = "journal.jsonl"
_SHA256 = re.compile("[0-9a-f]{64}")
_MOST_BYTES = 1 << 28
"""A journal has less than 1 KB for each tensor; a larger file is none."""


def damaged(path: Path) -> OutputError:
    """A file of an unfinished folder is not what a run left there."""
    return OutputError(f"{path}: is damaged; remove {path.parent} and start over")


class Journal:
    """What one run, with those that it continues, has written.

    Args:
        folder: the unfinished folder.
        fingerprint: fingerprint of the run.

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

    def take_up(self, names: Container[str]) -> bool:
        """Continue what an unfinished run has noted; False when that run did not start one.

        Args:
            names: the tensors that the run may have written.

        Raises:
            OutputError: it belongs to another run, or is damaged.
        """
        data = self._folder.read(JOURNAL, _MOST_BYTES)
        if data is None:
            return self._take_up_manifest(names)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return False
        try:
            first, *rest = [_entry(line) for line in whole.splitlines()]
            self._check_fingerprint(first["fingerprint"])
            for line in rest:
                self.hashes |= _hashes(line["written"], names)
                self.notes |= _notes(line["notes"])
        except (ValueError, LookupError, TypeError, RecursionError):
            raise damaged(self._folder.path / JOURNAL) from None
        if len(whole) < len(data):
            # A line torn by a kill: cut it off so that the next one starts clean.
            self._folder.truncate(JOURNAL, len(whole))
        return True

    def _take_up_manifest(self, names: Container[str]) -> bool:
        """Take up a run that was stopped between removing its journal and renaming its folder."""
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

    def _check_fingerprint(self, found: object) -> None:
        if found != self._fingerprint:
            raise OutputError(
                f"{self._folder.path}: belongs to a run with another recipe, source or version, "
                "or on a CPU with another number of threads; "
                "repeat that command to resume it, or remove the folder"
            )

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
