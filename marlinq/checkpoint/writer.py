"""Writing a checkpoint folder whose tensors are all planned before the first is computed.

The folder grows as ``OUT.partial``. Shards get their headers and full length at once, so a tensor is written
to its final place in any order and memory never holds a shard. A journal says which tensors are safely on
disk. Config, index and manifest come last; then the folder is renamed to ``OUT``.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from marlinq.checkpoint.header import (
    TensorInfo,
    TensorPlan,
    encode_header,
    fsync_folder,
    read_tensor,
    tensor_bytes,
)
from marlinq.checkpoint.reader import CONFIG, INDEX, MANIFEST, SINGLE, Checkpoint
from marlinq.errors import CheckpointError, OutputError

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
_JOURNAL = "journal.jsonl"


def plan_shards(plan: Sequence[TensorPlan], max_shard_bytes: int) -> list[tuple[str, list[TensorPlan]]]:
    """Split ``plan`` into named shards of at most ``max_shard_bytes``; a larger tensor gets its own shard."""
    shards: list[list[TensorPlan]] = []
    room = 0
    for tensor in plan:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= tensor.nbytes
    if len(shards) == 1:
        return [(SINGLE, shards[0])]
    count = len(shards)
    return [(f"model-{i:05d}-of-{count:05d}.safetensors", shard) for i, shard in enumerate(shards, start=1)]


class CheckpointWriter:
    """Writes one checkpoint folder; use it as a context manager.

    Args:
        out: the folder that will exist when :meth:`finish` returns; it must not exist yet.
        plan: every tensor of the output.
        max_shard_bytes: upper bound of a shard's tensor bytes.
        fingerprint: identifies the run (recipe, source, version); a resumed run must have the same.
        resume: continue an ``out.partial`` left behind instead of refusing it.

    Raises:
        OutputError: ``out`` exists, an unfinished run is in the way, another process writes it, or the disk
            has too little room.
    """

    def __init__(
        self,
        out: Path,
        plan: Sequence[TensorPlan],
        *,
        fingerprint: str,
        max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
        resume: bool = False,
    ) -> None:
        self.out = out
        self.partial = out.with_name(out.name + ".partial")
        self._fingerprint = fingerprint
        self._shards = plan_shards(plan, max_shard_bytes)
        self._headers: dict[str, bytes] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for shard, members in self._shards:
            self._headers[shard], infos = encode_header(shard, members)
            self.tensors.update((info.name, info) for info in infos)
        self.notes: dict[str, Any] = {}
        self._hashes: dict[str, str] = {}
        self._pending: dict[str, str] = {}
        self._files: dict[str, int] = {}
        self._lock = -1
        self._open(resume)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def written(self) -> set[str]:
        """Names of the tensors that the journal holds: a resumed run need not compute them again."""
        return set(self._hashes)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Put ``tensor`` into its planned place; it counts as written after the next :meth:`commit`.

        Several threads may write at once, but not while one commits.
        """
        info = self.tensors.get(name)
        if info is None or tuple(tensor.shape) != info.shape or tensor.dtype != info.dtype:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name}: planned {info and (info.dtype, info.shape)}, given {found}")
        data = tensor_bytes(tensor)
        descriptor, done = self._files[info.shard], 0
        while done < len(data):
            try:
                done += os.pwrite(descriptor, data[done : done + (1 << 30)], info.offset + done)
            except OSError as error:
                raise OutputError(
                    f"{self.partial / info.shard}: {error.strerror}; free some room, then resume"
                ) from None
        self._pending[name] = hashlib.sha256(data).hexdigest()

    def read_back(self, name: str) -> torch.Tensor:
        """A written tensor, checked against its hash.

        Raises:
            CheckpointError: its bytes are not the ones that were written.
        """
        info = self.tensors[name]
        tensor = read_tensor(self.partial / info.shard, info)
        if hashlib.sha256(tensor_bytes(tensor)).hexdigest() != (self._hashes | self._pending)[name]:
            raise CheckpointError(
                f"{self.partial / info.shard}: tensor {name} was changed since it was written; start over"
            )
        return tensor

    def commit(self, notes: Mapping[str, Any] | None = None) -> None:
        """Make everything written so far durable and note it in the journal.

        Args:
            notes: JSON values that belong to what was written; a resumed run finds them in ``notes``, and
                the manifest holds all of them under ``run``.
        """
        if not self._pending and not notes:
            return
        for shard in {self.tensors[name].shard for name in self._pending}:
            os.fsync(self._files[shard])
        self._append({"written": self._pending, "notes": notes or {}})
        self._hashes.update(self._pending)
        self.notes.update(notes or {})
        self._pending = {}

    def finish(
        self,
        *,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        side_files_from: Checkpoint | None = None,
        extra_json: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Path:
        """Write side files, manifest, index and config, and move the folder into place.

        Args:
            config: ``config.json``.
            manifest: recorded in ``marlinq.json`` together with the SHA-256 of every tensor.
            side_files_from: checkpoint whose tokenizer, templates and code files are copied.
            extra_json: further JSON files by name, for example ``quantize_config.json``.

        Returns:
            ``out``.
        """
        self.commit()
        missing = sorted(set(self.tensors) - set(self._hashes))
        if missing:
            raise ValueError(f"{missing[0]} and {len(missing) - 1} more planned tensors were never written")
        if side_files_from is not None:
            for name in side_files_from.side_files:
                target = self.partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(side_files_from.path / name, target)
        for name, value in (extra_json or {}).items():
            self._write_json(name, value)
        hashes = dict(sorted(self._hashes.items()))
        run = {"run": self.notes} if self.notes else {}
        self._write_json(MANIFEST, {**manifest, **run, "fingerprint": self._fingerprint, "tensors": hashes})
        if len(self._shards) > 1:
            weight_map = {name: info.shard for name, info in sorted(self.tensors.items())}
            total = sum(info.nbytes for info in self.tensors.values())
            self._write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        self._write_json(CONFIG, config)
        (self.partial / _JOURNAL).unlink(missing_ok=True)
        fsync_folder(self.partial)
        if self.out.exists():
            raise OutputError(
                f"{self.out}: appeared while {self.partial} was written; move it away and rename the other"
            )
        self.partial.rename(self.out)
        fsync_folder(self.out.parent)
        self.close()
        return self.out

    def close(self) -> None:
        """Close the files; what :meth:`commit` has seen stays for a resumed run."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files = {}
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self, resume: bool) -> None:
        if self.out.exists():
            raise OutputError(f"{self.out}: already exists; choose another output folder or remove it")
        exists = self.partial.exists()
        if exists and not resume:
            raise OutputError(
                f"{self.partial}: an unfinished run is here; continue it with --resume, or remove it"
            )
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{self.partial}: can't be created ({error.strerror})") from None
        self._lock = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise OutputError(
                f"{self.partial}: another process is writing it; wait for it or stop it"
            ) from None
        try:
            if not (exists and self._read_journal()):
                self._start()
            for shard, _ in self._shards:
                self._files[shard] = os.open(self.partial / shard, os.O_RDWR)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        total = sum(info.nbytes for info in self.tensors.values())
        free = shutil.disk_usage(self.partial).free
        if total > free:
            raise OutputError(f"{self.partial}: needs {total} bytes, the disk has {free} free")
        for shard, members in self._shards:
            with (self.partial / shard).open("wb") as file:
                file.write(self._headers[shard])
                file.truncate(len(self._headers[shard]) + sum(member.nbytes for member in members))
        # The journal's first line is written when all shards stand: without it there is nothing to resume.
        self._append({"fingerprint": self._fingerprint})
        fsync_folder(self.partial)

    def _read_journal(self) -> bool:
        """Take up the journal of an unfinished run; False when that run did not start one."""
        path = self.partial / _JOURNAL
        if not path.exists():
            return self._read_manifest()
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines:
            return False
        if lines[0] != {"fingerprint": self._fingerprint}:
            raise OutputError(
                f"{self.partial}: belongs to a run with another recipe, source or version; "
                "repeat that command to resume it, or remove the folder"
            )
        if len(whole) < len(data):
            # A line torn by a kill: cut it off so that the next one starts clean.
            os.truncate(path, len(whole))
        for line in lines[1:]:
            self._hashes.update(line["written"])
            self.notes.update(line["notes"])
        return True

    def _read_manifest(self) -> bool:
        """Take up a run that was stopped between removing its journal and renaming its folder."""
        if not (self.partial / CONFIG).exists() or not (self.partial / MANIFEST).exists():
            return False
        manifest = json.loads((self.partial / MANIFEST).read_text(encoding="utf-8"))
        if manifest["fingerprint"] != self._fingerprint:
            return False
        self._hashes = dict(manifest["tensors"])
        self.notes = dict(manifest.get("run", {}))
        return True

    def _append(self, line: Mapping[str, Any]) -> None:
        with (self.partial / _JOURNAL).open("ab") as file:
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        path = self.partial / name
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
