"""Whether ``config.json`` ties the output head to the embedding, and whether the stored tensors agree.

A head that is quantised, or stored with other values than the embedding, has a weight of its own. Loaders
that are told of a tie build the head from the embedding and leave the head's tensors unread
(docs/formats.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from marlinq.core.dtypes import ITEM_BYTES, torch_dtype
from marlinq.core.errors import CheckpointError
from marlinq.formats.dialects import is_head

if TYPE_CHECKING:
    import torch

    from marlinq.checkpoint.header import TensorInfo
    from marlinq.checkpoint.reader import Checkpoint
else:
    from marlinq.core.lazy import torch

_KEY = "tie_word_embeddings"
_INNER = "text_config"
_TABLES = ("embed", "wte", "word_embeddings")
_VALUES_AT_ONCE = 1 << 22


def says_tied(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` ties the head; the default of the model's class is not considered."""
    inner = config.get(_INNER)
    return config.get(_KEY) is True or (isinstance(inner, dict) and inner.get(_KEY) is True)


def says_untied(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` unties the head, at every level that has the key."""
    return config.get(_KEY) is False and not says_tied(config)


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` with an untied head, at every level that a loader reads."""
    changed = {**config, _KEY: False}
    inner = config.get(_INNER)
    if isinstance(inner, dict) and _KEY in inner:
        changed[_INNER] = {**inner, _KEY: False}
    return changed


def own_head(checkpoint: Checkpoint, quantized: Iterable[str] = ()) -> str | None:
    """Why the output head can't be tied to the embedding.

    Args:
        checkpoint: an open checkpoint.
        quantized: names of its quantised modules.

    Returns:
        ``NAME: is quantised`` or ``NAME: differs from the embedding``; None where nothing stored contradicts
        a tie.

    Raises:
        CheckpointError: a file was changed since it was opened, or ends early.
    """
    for module in quantized:
        if is_head(module):
            return f"{module}: is quantised"
    names = [name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith(".weight")]
    for head in filter(is_head, names):
        shape = checkpoint.tensors[f"{head}.weight"].shape
        tables = [
            f"{name}.weight"
            for name in names
            if any(mark in name.rpartition(".")[2] for mark in _TABLES)
            and not is_head(name)
            and checkpoint.tensors[f"{name}.weight"].shape == shape
        ]
        if tables and not any(same_values(checkpoint, f"{head}.weight", table) for table in tables):
            return f"{head}: differs from the embedding"
    return None


def same_values(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two stored floating-point tensors of one shape hold the same numbers, read in pieces.

    Raises:
        CheckpointError: a file was changed since it was opened, or ends early.
    """
    one, other = checkpoint.tensors[first], checkpoint.tensors[second]
    if one.shape != other.shape:
        return False
    if checkpoint.computes(first) or checkpoint.computes(second):
        return torch.equal(checkpoint.tensor(first).float(), checkpoint.tensor(second).float())
    values = one.nbytes // ITEM_BYTES[one.dtype]
    for start in range(0, values, _VALUES_AT_ONCE):
        count = min(_VALUES_AT_ONCE, values - start)
        mine, theirs = _piece(checkpoint, one, start, count), _piece(checkpoint, other, start, count)
        if one.dtype == other.dtype and mine == theirs:
            continue
        numbers = (
            torch.frombuffer(data, dtype=torch_dtype(info.dtype)).float()
            for data, info in ((mine, one), (theirs, other))
        )
        if not torch.equal(*numbers):
            return False
    return True


def _piece(checkpoint: Checkpoint, info: TensorInfo, start: int, count: int) -> bytearray:
    """Bytes of ``count`` values of a stored tensor from the value ``start`` on."""
    size = ITEM_BYTES[info.dtype]
    file, data = checkpoint.files[info.shard], bytearray(count * size)
    if not file.read_into(memoryview(data), info.offset + start * size):
        raise CheckpointError(f"{file.path}: tensor {info.name} ends early; the file was truncated")
    return data
