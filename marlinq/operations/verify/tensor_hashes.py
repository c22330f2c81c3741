"""Compares tensors with the hashes in a folder's manifest."""

from __future__ import annotations

import hashlib

from marlinq.checkpoint import MANIFEST, Checkpoint
from marlinq.checkpoint.header import header_text, tensor_bytes
from marlinq.checkpoint.reader import read_json
from marlinq.core.errors import CheckpointError
from marlinq.core.progress import ReportProgress
from marlinq.operations.verify.verification_report import MANIFEST_CHECK, Check, Findings


def check_manifest(checkpoint: Checkpoint, progress: ReportProgress) -> Check:
    """Compares dtype, shape and SHA-256 of every stored tensor with ``marlinq.json``."""
    findings = Findings(MANIFEST_CHECK)
    if not (checkpoint.path / MANIFEST).exists():
        findings.skipped = (
            f"no {MANIFEST}: the folder was not written by marlinq, or lost its manifest; no bytes were "
            "compared with those that were written"
        )
        return findings.result("")
    try:
        manifest = read_json(checkpoint.path, MANIFEST)
    except CheckpointError as error:
        findings.failures.append(str(error))
        return findings.result("")
    hashes, headers = manifest.get("tensors"), manifest.get("headers")
    if not isinstance(hashes, dict):
        findings.failures.append(f"{checkpoint.path / MANIFEST}: holds no object of tensor hashes")
        return findings.result("")
    for name in sorted(set(hashes) - set(checkpoint.tensors)):
        findings.failures.append(f"{name}: listed, but not stored")
    for done, name in enumerate(checkpoint.tensors):
        progress("hashing tensors", done, len(checkpoint.tensors))
        if name not in hashes:
            findings.failures.append(f"{name}: stored, but not listed")
        elif hashlib.sha256(tensor_bytes(checkpoint.tensor(name))).hexdigest() != hashes[name]:
            findings.failures.append(f"{name}: its bytes are not those that were written")
        elif isinstance(headers, dict) and headers.get(name) != header_text(checkpoint.tensors[name]):
            findings.failures.append(
                f"{name}: expected {headers.get(name)} as it was written, "
                f"found {header_text(checkpoint.tensors[name])}"
            )
    if not isinstance(headers, dict):
        return findings.result(
            f"{len(hashes)} tensors have the bytes that were written; "
            "an older manifest, which does not tell their dtypes and shapes"
        )
    return findings.result(f"{len(hashes)} tensors have the bytes, dtypes and shapes that were written")
