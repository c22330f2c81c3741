"""Write a checkpoint folder whose tensors are all planned before the first is computed.

Everything is written into ``OUT.partial``. Shards get their headers and full length at once, so a tensor is
written to its final place in any order, and memory never holds a whole shard. A journal lists the tensors
that are durably on disk, with their hashes, which a resumed run checks. Config, index and manifest are
written last; then the folder is renamed to ``OUT``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from marlinq.checkpoint.header import (
    TensorInfo,
    TensorPlan,
    encode_header,
    header_text,
    read_tensor,
    tensor_bytes,
)
from marlinq.checkpoint.journal import JOURNAL, Journal, damaged
from marlinq.checkpoint.partial import TEMPORARY, PartialFolder, writing
from marlinq.checkpoint.reader import CONFIG, INDEX, MANIFEST, SINGLE, Checkpoint
from marlinq.checkpoint.resumed_hashes import ResumedHashes, changed_since_written
from marlinq.checkpoint.source import OpenFile, SourceFile, reading
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import CheckpointError, MarlinqError, OutputError
from marlinq.core.files import open_regular
from marlinq.core.plain_values import load_json

if TYPE_CHECKING:
    import torch

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
_COPY_BYTES = 1 << 24
# Errors of copy_file_range on files or systems that it does not support.
_CANNOT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


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


def check_place(out: Path, *, resume: bool, source: Path | None = None) -> None:
    """Check that an output folder can be created, before any work is done for it.

    Args:
        out: folder to create.
        resume: whether the run continues an unfinished one, so that ``out.partial`` may exist.
        source: checkpoint folder that is read.

    Raises:
        OutputError: ``out`` exists, lies inside ``source`` or can't be made there, or an unfinished run is in
            the way.
    """
    if not Path(out).absolute().name:
        raise OutputError(f"{out}: already exists; choose another output folder")
    try:
        # Checks the longer of the two names.
        os.lstat(_partial(Path(out).absolute()))
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"{str(out)[:200]!r}: can't be created ({reason}); choose another folder") from None
    # lexists: a dangling link counts as existing.
    if os.path.lexists(out):
        raise OutputError(f"{out}: already exists; choose another output folder or remove it")
    if source is not None and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise OutputError(f"{out}: lies inside {source}, which is read; choose a folder outside it")
    try:
        partial, parent = _partial(out), _nearest(out)
        exists = os.path.lexists(partial)
        is_folder = exists and stat.S_ISDIR(partial.lstat().st_mode)
    except OSError as error:
        raise OutputError(f"{out}: can't be created ({error.strerror})") from None
    if exists and not is_folder:
        raise OutputError(f"{partial}: is in the way and is not a folder, but a file or a link; move it away")
    if exists and not resume:
        raise OutputError(f"{partial}: an unfinished run is here; continue it with --resume, or remove it")
    if not parent.is_dir():
        raise OutputError(f"{out}: can't be created ({parent} is not a folder)")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{out}: can't be created (no permission to write in {parent})")


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _nearest(out: Path) -> Path:
    """The nearest existing folder above ``out``."""
    return next(folder for folder in out.absolute().parents if folder.exists())


class CheckpointWriter:
    """Writes one checkpoint folder; use it as a context manager.

    Args:
        out: the folder that will exist when :meth:`finish` returns; it must not exist yet.
        plan: every tensor of the output.
        max_shard_bytes: upper bound of a shard's tensor bytes.
        fingerprint: identifies the run (recipe, source, version); a resumed run must have the same.
        resume: continue an ``out.partial`` left behind instead of refusing it.

    Attributes:
        resumed: whether an unfinished run was found and is continued.
        notes: notes given to :meth:`commit`, in this run and in the runs that it continues.

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
        check_place(out, resume=resume)
        self.partial = _partial(out)
        self._fingerprint = fingerprint
        self._shards = plan_shards(self.stored(plan), max_shard_bytes)
        self._headers: dict[str, bytes] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for shard, members in self._shards:
            self._headers[shard], infos = encode_header(shard, members)
            self.tensors.update((info.name, info) for info in infos)
        self._pending: dict[str, str] = {}
        self._copied: set[str] = set()
        self._committing, self._noting = threading.Lock(), threading.Lock()
        self._files: dict[str, OpenFile] = {}
        self._resumed_hashes: ResumedHashes | None = None
        self.resumed = False
        self.notes: dict[str, Any] = {}
        self._open()

    def stored(self, plan: Sequence[TensorPlan]) -> Sequence[TensorPlan]:
        """Plan of the files that hold all tensors of ``plan``; called once, before anything is written."""
        return plan

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(value, MarlinqError):
            self._close_files()
            self._discard_without_work()
        self.close()

    @property
    def written(self) -> set[str]:
        """Names of the tensors in the journal, which a resumed run does not compute again."""
        return set(self._journal.hashes)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write ``tensor`` to its planned place; it counts as written after the next :meth:`commit`.

        Several threads may write and commit at once: a commit covers the tensors completely written before
        it.
        """
        info = self.tensors.get(name)
        if info is None or tuple(tensor.shape) != info.shape or dtype_name(tensor.dtype) != info.dtype:
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{name}: planned {info and (info.dtype, info.shape)}, given {found}")
        data = tensor_bytes(tensor)
        self._settle(name)
        descriptor, done = self._files[info.shard].descriptor, 0
        with writing(self.partial / info.shard):
            while done < len(data):
                done += os.pwrite(descriptor, data[done : done + (1 << 30)], info.offset + done)
        self._note(name, hashlib.sha256(data).hexdigest())

    def copy(
        self,
        name: str,
        source: SourceFile,
        offset: int,
        check_piece: Callable[[memoryview], None] | None = None,
    ) -> None:
        """Write the tensor ``name`` with the bytes of ``source`` from ``offset`` on, as :meth:`write`.

        The operating system copies them from file to file if it can; they are read only for their hash, and
        for ``check_piece``, which is called with each piece of whole values.

        Raises:
            CheckpointError: the source ends early, or was changed since it was opened.
        """
        info = self.tensors[name]
        self._settle(name)
        descriptor = self._files[info.shard].descriptor
        digest, buffer = hashlib.sha256(), memoryview(bytearray(min(info.nbytes, _COPY_BYTES)))
        for start in range(0, info.nbytes, _COPY_BYTES):
            piece = buffer[: min(_COPY_BYTES, info.nbytes - start)]
            if not source.read_into(piece, offset + start):
                raise CheckpointError(f"{source.path}: tensor {name} ends early; the file was truncated")
            digest.update(piece)
            if check_piece is not None:
                check_piece(piece)
            with writing(self.partial / info.shard):
                _transfer(source.descriptor, offset + start, descriptor, info.offset + start, piece)
        # The copied bytes equal the hashed ones unless the file has changed in between.
        source.check_content()
        self._copied.add(name)
        self._note(name, digest.hexdigest())

    def read_back(self, name: str) -> torch.Tensor:
        """A written tensor, checked against its hash.

        Raises:
            CheckpointError: its bytes don't have the hash in the journal.
        """
        info = self.tensors[name]
        file = self._files[info.shard]
        tensor = read_tensor(file, info)
        if hashlib.sha256(tensor_bytes(tensor)).hexdigest() != (self._journal.hashes | self._pending)[name]:
            raise CheckpointError(changed_since_written(file, name))
        self._settle(name)
        return tensor

    def commit(self, notes: Mapping[str, Any] | None = None) -> None:
        """Make everything written so far durable and note it in the journal.

        Args:
            notes: JSON values by name that belong to these tensors; a resumed run has them in ``notes``, and
                the manifest has all of them under ``run``.
        """
        with self._committing:
            # Atomic: a tensor that another thread finishes now is in this commit or in the next.
            with self._noting:
                pending, self._pending = self._pending, {}
            if not pending and not notes:
                return
            try:
                with writing(self.partial):
                    for shard in {self.tensors[name].shard for name in pending}:
                        os.fsync(self._files[shard].descriptor)
                    self._journal.append(pending, notes or {})
                    self.notes = self._journal.notes
            except BaseException:
                with self._noting:
                    self._pending = pending | self._pending
                raise

    def _settle(self, name: str) -> None:
        if self._resumed_hashes is not None:
            self._resumed_hashes.settle(name)

    def _note(self, name: str, digest: str) -> None:
        with self._noting:
            self._pending[name] = digest

    def finish(
        self,
        *,
        config: Mapping[str, Any],
        manifest: Mapping[str, Any],
        side_files_from: Checkpoint | None = None,
        extra_json: Mapping[str, Mapping[str, Any]] | None = None,
        extra_text: Mapping[str, str] | None = None,
    ) -> Path:
        """Write side files, manifest, index and config, and rename the folder to ``out``.

        Args:
            config: ``config.json``.
            manifest: recorded in ``marlinq.json`` together with dtype, shape and SHA-256 of every tensor.
            side_files_from: checkpoint whose tokenizer, templates and code files are copied.
            extra_json: further JSON files by name, for example ``quantize_config.json``.
            extra_text: further text files by name, in place of side files of the same name.

        Returns:
            ``out``.

        Raises:
            CheckpointError: a tensor that an interrupted run wrote was changed since.
            OutputError: the folder can't be finished or moved.
        """
        self.commit()
        if self._resumed_hashes is not None:
            self._resumed_hashes.wait()
        missing = sorted(set(self.tensors) - self.written)
        if missing:
            raise ValueError(f"{missing[0]} and {len(missing) - 1} more planned tensors were never written")
        texts = extra_text or {}
        copied = [] if side_files_from is None else side_files_from.side_files
        side_files = [name for name in copied if name not in texts]
        index = [INDEX] if len(self._shards) > 1 else []
        with writing(self.partial):
            for name in side_files:
                self._copy(side_files_from.path / name, name)  # type: ignore[union-attr]
            for name, value in (extra_json or {}).items():
                self._write_json(name, value)
            for name, text in texts.items():
                self._write_text(name, text)
            hashes = dict(sorted(self._journal.hashes.items()))
            # Sorted, so that the manifest is the same whether or not the run was interrupted.
            run = {"run": dict(sorted(self.notes.items()))} if self.notes else {}
            headers = {name: header_text(self.tensors[name]) for name in hashes}
            record = {
                **manifest,
                **run,
                "fingerprint": self._fingerprint,
                "headers": headers,
                "tensors": hashes,
            }
            self._write_json(MANIFEST, record)
            if index:
                weight_map = {name: info.shard for name, info in sorted(self.tensors.items())}
                total = sum(info.nbytes for info in self.tensors.values())
                self._write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
            own = {*(shard for shard, _ in self._shards), *side_files, *(extra_json or ()), *texts}
            own |= {MANIFEST, *index}
            # A run that was stopped while it wrote the config has left a temporary file, which is
            # overwritten.
            self._refuse_foreign({*own, CONFIG, CONFIG + TEMPORARY, JOURNAL})
            self._write_json(CONFIG, config)
            self._folder.remove(JOURNAL)
            self._folder.sync()
            if os.path.lexists(self.out):
                raise OutputError(
                    f"{self.out}: appeared while {self.partial} was written; "
                    "move it away and rename the other"
                )
            self._folder.move(self.out)
        self.close()
        return self.out

    def _write_json(self, name: str, value: Any) -> None:
        # Half of a surrogate pair can't be encoded in UTF-8, so it is written as JSON's escape.
        self._write_text(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def _write_text(self, name: str, text: str) -> None:
        with writing(self.partial):
            self._folder.write(name, text.encode("utf-8", "backslashreplace"))

    def keep_bytes(self, name: str, data: bytes) -> None:
        """Store ``data`` durably and atomically in the unfinished folder, for a run that resumes this one.

        The first line of the file is the SHA-256 of the rest. Call :meth:`remove` before :meth:`finish`.
        """
        with writing(self.partial):
            self._folder.write(name, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)

    def kept_bytes(self, name: str) -> bytes | None:
        """The bytes that :meth:`keep_bytes` stored; None where it stored none.

        Raises:
            OutputError: the file is damaged.
        """
        return _kept_bytes(self._folder, name)

    def keep_json(self, name: str, value: Any) -> None:
        """Store a JSON value like :meth:`keep_bytes`."""
        self.keep_bytes(name, json.dumps(value).encode())

    def kept_json(self, name: str) -> Any:
        """The value that :meth:`keep_json` stored; None where it stored none.

        Raises:
            OutputError: as :meth:`kept_bytes`.
        """
        return _kept_json(self._folder, name)

    def remove(self, name: str) -> None:
        """Remove a file of :meth:`keep_json` or :meth:`keep_bytes`, complete or not, if it exists."""
        with writing(self.partial):
            self._folder.remove(name)
            self._folder.remove(name + TEMPORARY)

    def close(self) -> None:
        """Close the files; committed tensors stay for a resumed run."""
        self._close_files()
        self._folder.close()

    def _close_files(self) -> None:
        if self._resumed_hashes is not None:
            self._resumed_hashes.close()
        for file in self._files.values():
            # Committed tensors are durable already, so errors of close don't matter.
            with contextlib.suppress(OSError):
                os.close(file.descriptor)
        self._files = {}

    def _discard_without_work(self) -> None:
        """Removes the folder if it holds nothing but copied tensors: it would only stand in the way of the
        command that mends the error."""
        own = {JOURNAL, *(shard for shard, _ in self._shards)}
        if self.resumed or self.notes or not self._copied.issuperset(self._journal.hashes):
            return
        with contextlib.suppress(OSError):
            if own.issuperset(self._folder.names()):
                self._folder.discard()

    def _open(self) -> None:
        if not os.path.lexists(self.partial):
            self._check_room()
        self._folder = PartialFolder(self.partial)
        self._journal = Journal(self._folder, self._fingerprint)
        try:
            with writing(self.partial):
                self.resumed = self._folder.existed and self._journal.take_up(self.tensors)
                self.notes = self._journal.notes
                if not self.resumed:
                    self._start()
                for shard, members in self._shards:
                    self._files[shard] = OpenFile(self.partial / shard, self._folder.open(shard))
                    self._check_shard(shard, members)
                if self._journal.hashes:
                    self._resumed_hashes = ResumedHashes(self._files, self.tensors, self._journal.hashes)
        except BaseException:
            self.close()
            raise

    def _check_shard(self, shard: str, members: Sequence[TensorPlan]) -> None:
        header = self._headers[shard]
        size = len(header) + sum(member.nbytes for member in members)
        descriptor = self._files[shard].descriptor
        if os.fstat(descriptor).st_size != size or os.pread(descriptor, len(header), 0) != header:
            raise damaged(self.partial / shard)

    def _copy(self, source: Path, name: str) -> None:
        with reading(source):
            descriptor = open_regular(source)
        try:
            before = os.fstat(descriptor)
            self._folder.copy(descriptor, name)
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise CheckpointError(f"{source}: was changed while it was copied; run the command again")

    def _refuse_foreign(self, own: Collection[str]) -> None:
        for name in self._folder.names():
            # NFS renames a file that is removed while open to such a name.
            if name not in own and not name.startswith(".nfs"):
                raise OutputError(
                    f"{self.partial}: holds {name}, which no unfinished run of this kind left; move it away"
                )

    def _check_room(self) -> None:
        total = sum(info.nbytes for info in self.tensors.values())
        free = shutil.disk_usage(_nearest(self.out)).free
        if total > free:
            raise OutputError(
                f"{self.out}: needs {total / 1e6:.1f} MB, the disk has {free / 1e6:.1f} MB free; "
                "free some room or choose a folder on another disk"
            )

    def _start(self) -> None:
        # A run stopped at this point leaves a journal without a whole line, or shards without a journal.
        self._refuse_foreign({JOURNAL, *(shard for shard, _ in self._shards)})
        self._folder.remove(JOURNAL)
        for shard, members in self._shards:
            descriptor = self._folder.create(shard)
            try:
                os.pwrite(descriptor, self._headers[shard], 0)
                os.ftruncate(descriptor, len(self._headers[shard]) + sum(member.nbytes for member in members))
            finally:
                os.close(descriptor)
        # The journal begins after all shards exist; a folder without a journal is started over.
        self._journal.begin()
        self._folder.sync()


def _transfer(source: int, source_offset: int, target: int, target_offset: int, data: memoryview) -> None:
    """Copy ``data``, which has been read from ``source``, to ``target``, by copy_file_range if possible."""
    done = 0
    try:
        while done < len(data) and hasattr(os, "copy_file_range"):
            count = os.copy_file_range(
                source, target, len(data) - done, source_offset + done, target_offset + done
            )
            if not count:
                break
            done += count
    except OSError as error:
        if error.errno not in _CANNOT_COPY:
            raise
    # Write the rest from memory.
    while done < len(data):
        done += os.pwrite(target, data[done:], target_offset + done)


def kept_json(out: Path, name: str) -> Any:
    """The JSON value that an unfinished run of ``out`` stored by :meth:`CheckpointWriter.keep_json`; or None.

    For use before a :class:`CheckpointWriter` resumes the run.

    Raises:
        OutputError: it is damaged, or another process writes the folder.
    """
    partial = _partial(out)
    if not os.path.lexists(partial):
        return None
    folder = PartialFolder(partial)
    try:
        return _kept_json(folder, name)
    finally:
        folder.close()


def _kept_bytes(folder: PartialFolder, name: str) -> bytes | None:
    with writing(folder.path):
        content = folder.read(name)
    if content is None:
        return None
    digest, _, data = content.partition(b"\n")
    if digest != hashlib.sha256(data).hexdigest().encode():
        raise damaged(folder.path / name)
    return data


def _kept_json(folder: PartialFolder, name: str) -> Any:
    data = _kept_bytes(folder, name)
    if data is None:
        return None
    try:
        return load_json(data)
    except (ValueError, RecursionError):
        raise damaged(folder.path / name) from None
