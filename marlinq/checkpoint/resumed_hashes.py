"""Check the tensors of an interrupted run against their hashes, in the background of the run that resumes
it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from marlinq.checkpoint.header import TensorInfo
from marlinq.checkpoint.source import OpenFile
from marlinq.core.errors import CheckpointError

_THREADS = 2
"""Threads that compute hashes. A core hashes 0.5 to 2 GB/s, so two keep up with a disk and leave cores
free."""
_PIECE_BYTES = 1 << 24


class ResumedHashes:
    """Checks tensors that a resumed run will not compute again, in background threads.

    Args:
        files: open shards by name.
        tensors: place of each tensor.
        hashes: SHA-256 of each tensor to check, from the journal.
    """

    def __init__(
        self, files: Mapping[str, OpenFile], tensors: Mapping[str, TensorInfo], hashes: Mapping[str, str]
    ) -> None:
        self._files = files
        self._settled: set[str] = set()
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="marlinq-hash")
        names = sorted(hashes, key=lambda name: (tensors[name].shard, tensors[name].offset))
        self._changed: dict[TensorInfo, Future[bool]] = {
            tensors[name]: self._pool.submit(self._has_changed, tensors[name], hashes[name]) for name in names
        }

    def settle(self, name: str) -> None:
        """Stop checking a tensor, because it will be written again or was checked elsewhere.

        A writer calls it before it writes, so that hashing a half-written tensor is no error.
        """
        self._settled.add(name)

    def wait(self) -> None:
        """Wait until every tensor is hashed.

        Raises:
            CheckpointError: the hash of a tensor differs from that in the journal.
        """
        for info, changed in self._changed.items():
            if changed.result() and info.name not in self._settled:
                raise CheckpointError(changed_since_written(self._files[info.shard], info.name))

    def close(self) -> None:
        """Stop hashing; the files may be closed afterwards."""
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _has_changed(self, info: TensorInfo, expected: str) -> bool:
        file, digest = self._files[info.shard], hashlib.sha256()
        buffer = memoryview(bytearray(min(info.nbytes, _PIECE_BYTES)))
        for start in range(0, info.nbytes, _PIECE_BYTES):
            if self._stopped.is_set() or info.name in self._settled:
                return False
            piece = buffer[: min(_PIECE_BYTES, info.nbytes - start)]
            file.read_into(piece, info.offset + start)
            digest.update(piece)
        return digest.hexdigest() != expected


def changed_since_written(file: OpenFile, name: str) -> str:
    """Message for a tensor of an unfinished folder whose hash differs from the journal's."""
    return (
        f"{file.path}: tensor {name} was changed since it was written; "
        f"remove {file.path.parent} and start over"
    )
