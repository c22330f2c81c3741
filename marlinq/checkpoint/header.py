"""Reading and writing safetensors headers, trusting nothing in them.

File: an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors, "Layout").
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlinq.core.dtypes import ITEM_BYTES, torch_dtype
from marlinq.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
else:
    from marlinq.core.lazy import torch

MAX_HEADER_BYTES = 100_000_000
"""The cap that the safetensors library sets too."""

DTYPES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Names of dtypes (:mod:`marlinq.core.dtypes`) by what a safetensors header calls them."""
_IN_HEADERS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where one stored tensor lies: ``offset`` is in bytes from the start of the file ``shard``; ``dtype`` is
    a name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TensorPlan:
    """A tensor that will be written; ``dtype`` is a name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say in one line that the system would not let ``path`` be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: can't be read ({error.strerror or error}); "
            "mend its permissions or copy it again"
        ) from None


def parse_json(text: bytes, what: str) -> Any:
    """JSON with duplicate keys and absurd nesting refused; ``what`` names the file in the message."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{what}: the key {twice!r} stands twice; the file is damaged or hostile")
        return result

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what}: not valid JSON ({error}); download the file again") from None


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of one shard, in file order.

    Raises:
        CheckpointError: the file is shorter than its header says (a truncated download), or the header is
            malformed: unknown dtypes, shapes that don't match their sizes, overlaps or holes.
    """
    shard = path.name
    with reading(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file")
        (length,) = struct.unpack("<Q", prefix)
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{path}: the header claims {length} bytes, the file holds {size - 8} after its length field "
                f"(cap {MAX_HEADER_BYTES}); it is truncated or not a safetensors file"
            )
        header = parse_json(file.read(length), f"{path} (header)")
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    start = 8 + length
    infos = [
        _entry(path, shard, start, name, entry) for name, entry in header.items() if name != "__metadata__"
    ]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    position = start
    for info in infos:
        if info.offset != position:
            raise CheckpointError(
                f"{path}: tensor {info.name} starts at byte {info.offset}, expected {position}; "
                "its data overlaps another tensor or leaves a hole"
            )
        position += info.nbytes
    if position != size:
        raise CheckpointError(
            f"{path}: the header describes {position} bytes, the file has {size}; "
            + ("it is truncated, download it again" if size < position else "it has trailing data")
        )
    return infos


def _entry(path: Path, shard: str, start: int, name: str, entry: object) -> TensorInfo:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: the header entry must have exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: unknown dtype {entry['dtype']!r}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _naturals(shape) or len(shape) > 8:
        raise CheckpointError(f"{where}: malformed shape {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: malformed data_offsets {offsets!r}")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    span = offsets[1] - offsets[0]
    if nbytes != span:
        raise CheckpointError(
            f"{where}: shape {shape} of {entry['dtype']} takes {nbytes} bytes, data_offsets give {span}"
        )
    return TensorInfo(name, dtype, tuple(shape), shard, start + offsets[0], nbytes)


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62 for item in value
    )


def encode_header(shard: str, plans: Sequence[TensorPlan]) -> tuple[bytes, list[TensorInfo]]:
    """The header bytes of a shard holding ``plans`` and where each tensor will lie.

    Wide dtypes come first, as the safetensors library orders them, so that every tensor is aligned.
    """
    ordered = sorted(plans, key=lambda plan: (-ITEM_BYTES[plan.dtype], plan.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for plan in ordered:
        end = position + plan.nbytes
        header[plan.name] = {
            "dtype": _IN_HEADERS[plan.dtype],
            "shape": list(plan.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    infos = []
    for plan in ordered:
        begin = header[plan.name]["data_offsets"][0]
        infos.append(TensorInfo(plan.name, plan.dtype, plan.shape, shard, start + begin, plan.nbytes))
    return struct.pack("<Q", len(text)) + text, infos


def read_tensor(path: Path, info: TensorInfo) -> torch.Tensor:
    """One tensor in memory of its own, read in one pass.

    Raises:
        CheckpointError: the file has become shorter since its header was checked.
    """
    buffer = torch.empty(info.nbytes, dtype=torch.uint8)
    with reading(path), path.open("rb", buffering=0) as file:
        file.seek(info.offset)
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        done = 0
        while done < info.nbytes:
            count = file.readinto(view[done:])
            if not count:
                raise CheckpointError(f"{path}: tensor {info.name} ends early; the file was truncated")
            done += count
    return buffer.view(torch_dtype(info.dtype)).reshape(info.shape)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in row-major order, without a copy when it is contiguous and on the CPU."""
    octets = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return memoryview(octets.numpy())  # type: ignore[arg-type]


def fsync_folder(folder: Path) -> None:
    """Make renames and new files in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
