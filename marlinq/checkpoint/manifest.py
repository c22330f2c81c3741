"""What ``marlinq.json`` records of the run that made a folder, and what tells one run from another."""

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
    """How a manifest names what a run read."""
    return {"name": checkpoint.path.name, "identity": checkpoint.identity()}


def fingerprint_of(checkpoint: Checkpoint, *decisions: object) -> str:
    """Identifies a run by what it reads and by ``decisions``, all plain values that its output depends on."""
    parts = json.dumps([checkpoint.state(), *decisions], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()
