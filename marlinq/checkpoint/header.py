"""Read and write safetensors headers; nothing in a header is trusted.

File: an unsigned 64-bit little-endian length, that many bytes of JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors, "Layout").
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlinq.checkpoint.source import OpenFile, SourceFile
from marlinq.core.dtypes import ITEM_BYTES, torch_dtype
from marlinq.core.errors import CheckpointError
from marlinq.core.plain_values import load_json, read_int
from marlinq.core.safe_text import half_pair

if TYPE_CHECKING:
    import torch
else:
    from marlinq.core.lazy import torch

MAX_HEADER_BYTES = 100_000_000
"""Bytes of a header at most, as in the safetensors library."""

MAX_NAME = 1_000
"""Characters of a tensor's name at most; real names stay below a hundred."""

DTYPES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
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
"""Names of dtypes (:mod:`marlinq.core.dtypes`) by their names in safetensors headers."""
_IN_HEADERS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor's dtype, shape and place.

    Attributes:
        name: name of the tensor.
        dtype: name of the dtype.
        shape: extents.
        shard: name of its file.
        offset: bytes from the start of that file.
        nbytes: bytes of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


def header_text(info: TensorInfo) -> str:
    """Dtype and shape as a manifest records them: ``float16 [64, 128]``."""
    return f"{info.dtype} {list(info.shape)}"


@dataclass(frozen=True)
class TensorPlan:
    """A tensor to be written; ``dtype`` is the name of its dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def parse_json(text: bytes, what: str, *, strict: bool = False) -> Any:
    """The value of JSON in UTF-8, within the bounds of :mod:`marlinq.core.plain_values`, without duplicate
    keys.

    Args:
        text: the JSON.
        what: name of the file in error messages.
        strict: read as the safetensors library does: no NaN, no infinities, -0 is no natural number.

    Raises:
        CheckpointError: the text is no such JSON.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(
                f"{what}: the key {_short(twice)} stands twice; the file is damaged or hostile"
            )
        return result

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no JSON number")

    def natural(digits: str) -> int:
        # Python reads -0 as the integer 0; the safetensors library reads it as a float.
        return -1 if digits == "-0" else read_int(digits)

    try:
        return load_json(
            text,
            pairs=unique,
            constant=refuse if strict else None,
            integer=natural if strict else read_int,
        )
    except ValueError as error:
        raise CheckpointError(f"{what}: not valid JSON ({error}); download the file again") from None


def read_header(file: SourceFile) -> list[TensorInfo]:
    """The tensors of one shard, in file order.

    Raises:
        CheckpointError: the file is shorter than its header says (a truncated download), or the header is
            malformed: unknown dtypes, shapes that don't match their sizes, overlaps or holes.
    """
    path, size = file.path, file.size
    prefix = file.read(0, 8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {size} bytes is too short for a safetensors file")
    (length,) = struct.unpack("<Q", prefix)
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{path}: the header claims {length} bytes, the file holds {size - 8} after its length field "
            f"(cap {MAX_HEADER_BYTES}); it is truncated or not a safetensors file"
        )
    header = parse_json(file.read(8, length), f"{path} (header)", strict=True)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    _check_metadata(path, header.pop("__metadata__", {}))
    start = 8 + length
    infos = [_entry(path, path.name, start, name, entry) for name, entry in header.items()]
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


def _check_metadata(path: Path, metadata: object) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: the header's __metadata__ must be an object of strings")
    if any(half_pair(text) for pair in metadata.items() for text in pair):
        raise CheckpointError(f"{path}: the header's __metadata__ holds half of a surrogate pair")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _entry(path: Path, shard: str, start: int, name: str, entry: object) -> TensorInfo:
    # Names are printed in reports and messages, where a line break or an escape code would fake other output.
    if not name.isprintable() or len(name) > MAX_NAME:
        raise CheckpointError(
            f"{path}: tensor {_short(name)}: expected a name of at most {MAX_NAME} printable characters; "
            "the file is damaged or hostile"
        )
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: the header entry must have exactly dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(f"{where}: unknown dtype {_short(entry['dtype'])}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    # The safetensors library multiplies extents in 64 bits, also those of an empty tensor.
    if not _naturals(shape) or len(shape) > 8 or math.prod(size for size in shape if size) >= 1 << 62:
        raise CheckpointError(f"{where}: malformed shape {_short(shape)}")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: malformed data_offsets {_short(offsets)}")
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
    """The header bytes of a shard with the tensors ``plans``, and the place of each tensor.

    As in the safetensors library, wide dtypes come first, so that every tensor is aligned.
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


def read_tensor(file: OpenFile, info: TensorInfo) -> torch.Tensor:
    """One tensor in memory of its own, read in one pass.

    Raises:
        CheckpointError: the file has changed since its header was checked.
    """
    buffer = torch.empty(info.nbytes, dtype=torch.uint8)
    if not file.read_into(memoryview(buffer.numpy()), info.offset):  # type: ignore[arg-type]
        raise CheckpointError(f"{file.path}: tensor {info.name} ends early; the file was truncated")
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
