"""Read a Hugging Face checkpoint folder lazily, without trusting anything in it.

Nothing is unpickled, and no code of the checkpoint is run. Index files can't point outside the folder, nor
can symbolic links, except those of the Hub's cache to its blobs. Headers are checked before memory is
allocated. Config, index and shards stay open, so that changes while they are read are noticed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlinq.checkpoint.draft_head import is_of_draft_head
from marlinq.checkpoint.header import TensorInfo, parse_json, read_header, read_tensor
from marlinq.checkpoint.hub_download import WANTED, download
from marlinq.checkpoint.source import SourceFile, reading
from marlinq.core.errors import CheckpointError, UsageError
from marlinq.core.files import kind_of, read_regular
from marlinq.core.model_source import local_folder
from marlinq.core.progress import ReportProgress

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
MANIFEST = "marlinq.json"
QUANTIZE_CONFIGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
EVALUATION = "evaluation.json"
REPORTS = ("report.html", "report.csv", "report.json", EVALUATION)
"""Files that describe one folder and are not copied to another; `marlinq report` and `marlinq eval --keep`
write them."""

_MAX_JSON_BYTES = 64 * 1024 * 1024
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".index.json", ".npz"
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint folder; build it with :meth:`open`.

    Attributes:
        path: the folder.
        config: ``config.json`` as parsed.
        tensors: every stored tensor by name, shard by shard in file order.
        side_files: relative paths of all other files a copy needs (tokenizer, templates, code), sorted.
        files: open config, index and shards by name.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    side_files: list[str]
    files: Mapping[str, SourceFile]

    @classmethod
    def open(
        cls,
        source: str | os.PathLike[str],
        *,
        revision: str | None = None,
        progress: ReportProgress | None = None,
    ) -> Checkpoint:
        """Open a local folder, or download a Hub id such as ``org/name`` and open it.

        Args:
            source: a folder or Hub id.
            revision: branch, tag or commit of a Hub id; None is the main branch.
            progress: called during a download; None lets the Hub's library draw bars.

        Raises:
            UsageError: ``revision`` is given for a local folder.
            CheckpointError: the folder is absent, incomplete, inconsistent or hostile.
            EnvironmentProblem: a Hub id could not be downloaded.
        """
        folder = locate(source, revision=revision, progress=progress)
        files: dict[str, SourceFile] = {}
        config = _read_kept(folder, CONFIG, files)
        tensors = _read_tensors(folder, files)
        _check_one_model(folder, config, files, tensors)
        return cls(folder, config, tensors, _side_files(folder), files)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def shards(self) -> list[str]:
        """The shard files, in order of first use."""
        return list(dict.fromkeys(info.shard for info in self.tensors.values()))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name`` on the CPU, in memory of its own.

        Raises:
            CheckpointError: there is no such tensor, or its file was changed since it was opened.
        """
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: no tensor named {name}")
        return read_tensor(self.files[info.shard], info)

    def computes(self, name: str) -> bool:
        """Whether the tensor ``name`` is computed, not read from a place in a file."""
        return False

    def part(self, name: str, index: int) -> torch.Tensor:
        """Element ``index`` along the first axis of the tensor ``name``, as :meth:`tensor` would give it.

        Raises:
            CheckpointError: as :meth:`tensor`, or the tensor has no such element.
        """
        info = self.tensors.get(name)
        if info is None or not info.shape or not 0 <= index < info.shape[0]:
            raise CheckpointError(f"{self.path}: no element {index} of a tensor named {name}")
        nbytes = info.nbytes // info.shape[0]
        place = replace(info, shape=info.shape[1:], nbytes=nbytes, offset=info.offset + index * nbytes)
        return read_tensor(self.files[info.shard], place)

    def check_unchanged(self) -> None:
        """Check that config, index and shards are still the files that were opened, with the same headers.

        An operation calls it after its last read, before it reports success.

        Raises:
            CheckpointError: one was rewritten, replaced or removed.
        """
        for file in self.files.values():
            file.check_place()
        by_shard: dict[str, list[TensorInfo]] = {shard: [] for shard in self.shards}
        for info in self.tensors.values():
            by_shard[info.shard].append(info)
        for shard, infos in by_shard.items():
            if read_header(self.files[shard]) != infos:
                raise CheckpointError(
                    f"{self.path / shard}: its header was changed while it was read; run the command again"
                )

    @property
    def left_out(self) -> list[str]:
        """Relative paths of files that are no part of the open checkpoint: weights in other formats, or
        shards that the index does not list."""
        own = {CONFIG, INDEX, MANIFEST, *QUANTIZE_CONFIGS, *REPORTS, *self.shards, *self.side_files}
        return sorted(name for name in _walk(self.path) if name not in own)

    def identity(self) -> str:
        """A hash of the config and of every tensor's name, dtype, shape, place and file time.

        It names the checkpoint in a manifest without reading the weights.
        """
        digest = hashlib.sha256(repr(sorted(self.config.items())).encode())
        for info in self.tensors.values():
            digest.update(repr((info.name, info.dtype, info.shape, info.shard, info.offset)).encode())
        for shard in self.shards:
            file = self.files[shard]
            digest.update(repr((shard, file.size, file.times[0])).encode())
        return digest.hexdigest()

    def state(self) -> str:
        """The identity with the times of the files' last status change; a resumed run must find the same.

        A program that rewrites a shard can restore its modification time, but not the time of its status
        change.
        """
        changes = [(name, file.times[1]) for name, file in sorted(self.files.items())]
        return hashlib.sha256(repr((self.identity(), changes)).encode()).hexdigest()


def locate(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: ReportProgress | None = None,
    wanted: Sequence[str] = WANTED,
) -> Path:
    """The local folder of ``source``; for a Hub id the files ``wanted`` are downloaded
    (:func:`marlinq.checkpoint.hub_download.download`).

    Raises:
        UsageError: there is a revision, but ``source`` is a folder.
        MarlinqError: as :func:`~marlinq.checkpoint.hub_download.download`.
    """
    folder, text = local_folder(source), os.fspath(source)
    if folder is None:
        return download(text, revision=revision, progress=progress, wanted=wanted)
    if revision is not None:
        raise UsageError(
            f"{text}: is a local folder, which has no revision {revision!r}; leave out --revision"
        )
    return folder


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object from ``folder / name``.

    Raises:
        CheckpointError: missing, too large, outside the folder, no regular file, or not an object.
    """
    path = _inside(folder, name)
    with reading(path):
        text = read_regular(path, _MAX_JSON_BYTES)
    return _json_object(path, text)


def _read_kept(folder: Path, name: str, files: dict[str, SourceFile]) -> dict[str, Any]:
    """:func:`read_json` for a file that is kept open in ``files``."""
    file = files[name] = SourceFile(_inside(folder, name))
    if file.size > _MAX_JSON_BYTES:
        raise CheckpointError(f"{file.path}: larger than {_MAX_JSON_BYTES} bytes; refusing to read it")
    return _json_object(file.path, file.read(0, file.size))


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    value = parse_json(text, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _roots(folder: Path) -> tuple[Path, ...]:
    real = folder.resolve()
    # The Hub cache keeps <repo>/snapshots/<revision>/file -> ../../blobs/<hash>.
    if real.parent.name == "snapshots" and (real.parent.parent / "blobs").is_dir():
        return real, real.parent.parent / "blobs"
    return (real,)


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (RuntimeError, OSError):
        # Python below 3.13 raises RuntimeError for links that form a circle.
        raise CheckpointError(
            f"{path}: a symbolic link that can't be followed; replace it by the file"
        ) from None


def _inside(folder: Path, name: str) -> Path:
    """Resolved path of ``folder / name``, an existing regular file inside the folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise CheckpointError(f"{folder}: refers to the file {name!r}, which is not a plain file name")
    path = folder / name
    real = _resolved(path)
    if not any(root == real.parent or root in real.parents for root in _roots(folder)):
        raise CheckpointError(f"{path}: a symbolic link that leads out of the folder; replace it by the file")
    kind = _kind(real)
    if kind is None:
        raise CheckpointError(f"{path}: missing; the checkpoint is incomplete")
    if kind != "a regular file":
        raise CheckpointError(f"{path}: {kind}, expected a regular file; replace it by the file")
    return path


def _read_tensors(folder: Path, files: dict[str, SourceFile]) -> dict[str, TensorInfo]:
    index = _read_index(folder, files)
    shards = sorted(set(index.values())) if index is not None else _unindexed_shards(folder)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        files[shard] = SourceFile(_inside(folder, shard))
        for info in read_header(files[shard]):
            if info.name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {info.name} is stored twice, in {tensors[info.name].shard} and {shard}"
                )
            if index is not None and index.get(info.name) != shard:
                listed = index.get(info.name)
                where = f"lists it in {listed}" if listed else "does not list it"
                raise CheckpointError(f"{folder / shard}: holds tensor {info.name}, but {INDEX} {where}")
            tensors[info.name] = info
    missing = sorted(set(index or ()) - set(tensors))
    if index is not None and missing:
        raise CheckpointError(
            f"{folder / index[missing[0]]}: tensor {missing[0]!r} is listed in {INDEX} but not stored there "
            f"({len(missing)} such tensors)"
        )
    return tensors


def _check_one_model(
    folder: Path,
    config: Mapping[str, Any],
    files: Mapping[str, SourceFile],
    tensors: Mapping[str, TensorInfo],
) -> None:
    """Checks that transformers reads the same weights from the folder as marlinq does.

    Where :data:`SINGLE` exists, transformers reads it and no index. It needs no draft head, which some makers
    put in a file beside it.

    Raises:
        CheckpointError: the folder holds several models, and transformers takes another.
    """
    shards = [name for name in files if name not in (CONFIG, INDEX)]
    others = [info.name for info in tensors.values() if info.shard != SINGLE]
    only_drafts = SINGLE in files and all(is_of_draft_head(name, config) for name in others)
    if (folder / SINGLE).exists() and not only_drafts:
        raise CheckpointError(
            f"{folder}: holds {SINGLE} beside the {len(shards)} files of {INDEX}; transformers reads the "
            "former and most servers the latter; remove what is stale"
        )
    named = config.get("transformers_weights")
    same = [name for name in (INDEX, SINGLE) if name in files] or shards
    if named is not None and named not in same:
        raise CheckpointError(
            f"{folder / CONFIG}: transformers_weights names other weights than {same[0]}, which servers "
            "read; keep those that you mean, and remove transformers_weights"
        )
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder / ADAPTER}: an adapter beside the weights, which transformers adds to them and marlinq "
            "does not; merge it into the weights (PEFT's merge_and_unload), or move it away"
        )


def _read_index(folder: Path, files: dict[str, SourceFile]) -> dict[str, str] | None:
    if not (folder / INDEX).exists():
        return None
    weight_map = _read_kept(folder, INDEX, files).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: expected a non-empty weight_map object")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / INDEX}: tensor {name!r} points to {shard!r}, not to a safetensors file"
            )
    return weight_map


def _unindexed_shards(folder: Path) -> list[str]:
    if (folder / SINGLE).exists():
        return [SINGLE]
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(shards) == 1:
        return shards
    if shards:
        raise CheckpointError(
            f"{folder}: {len(shards)} safetensors files but no {INDEX}; download the index too"
        )
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]}: pickled weights are never loaded; save the model again as safetensors"
        )
    raise CheckpointError(f"{folder}: no safetensors file; pass the folder of a Hugging Face checkpoint")


def _side_files(folder: Path) -> list[str]:
    return sorted(
        name
        for name in _walk(folder)
        if name not in (CONFIG, MANIFEST, *QUANTIZE_CONFIGS, *REPORTS) and not name.endswith(_WEIGHT_SUFFIXES)
    )


def _walk(folder: Path) -> Iterator[str]:
    roots = _roots(folder)
    for parent, folders, files in os.walk(folder, followlinks=False):
        # Hidden folders belong to version control and download tools.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in files:
            if name.startswith("."):
                continue
            path = Path(parent) / name
            real = _resolved(path)
            if not any(root in real.parents for root in roots):
                raise CheckpointError(
                    f"{path}: a symbolic link that leads out of the folder; replace it by the file"
                )
            kind = _kind(real)
            if kind == "a regular file":
                yield str(path.relative_to(folder))
            elif kind not in (None, "a folder"):
                # Libraries would open a named pipe and wait for ever.
                raise CheckpointError(f"{path}: {kind}, expected a regular file; remove it")


def _kind(path: Path) -> str | None:
    try:
        return kind_of(path.stat().st_mode)
    except OSError:
        return None
