"""The manifest ``marlinq.json``, which records the run that made a folder; and fingerprints of runs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from marlinq.checkpoint.reader import Checkpoint
from marlinq.core.version import __version__


def manifest_of(operation: str, **facts: Any) -> dict[str, Any]:
    """The manifest of a run of ``operation``; :meth:`CheckpointWriter.finish` adds hashes and fingerprint."""
    return {"tool": f"marlinq {__version__}", "operation": operation, **facts}


def source_of(checkpoint: Checkpoint) -> dict[str, str]:
    """The entry of a manifest that identifies the checkpoint that a run read."""
    return {"name": checkpoint.path.name, "identity": checkpoint.identity()}


def fingerprint_of(checkpoint: Checkpoint, *decisions: object) -> str:
    """Digest of the source and of ``decisions``: all other plain values that the output of a run depends
    on."""
    parts = json.dumps([checkpoint.state(), *decisions], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()
