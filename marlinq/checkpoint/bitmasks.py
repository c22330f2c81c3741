"""Unquantised 2:4 sparse weights that compressed-tensors stores without their zeros (``sparse-24-bitmask``).

    <linear>.compressed   the model's dtype [N, K/2]   kept weights of each row, by ascending channel
    <linear>.bitmask      uint8 [N, K/8]               bit j of byte b is set where channel 8b + j is kept
    <linear>.shape        int64 [2, 1]                 N, K

Of every four channels two are kept. Such a folder is read as one with dense weights; nothing writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from marlinq.checkpoint.derived import DerivedCheckpoint
from marlinq.checkpoint.header import TensorInfo
from marlinq.checkpoint.quantization_config import config_in, without_quantization_config
from marlinq.checkpoint.reader import CONFIG, Checkpoint
from marlinq.core.dtypes import FLOATS
from marlinq.core.errors import CheckpointError
from marlinq.core.sparsity import TWO_OF_FOUR

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

BITMASK_FORMAT = "sparse-24-bitmask"
_KEPT, _MASK, _SHAPE = _SUFFIXES = "compressed", "bitmask", "shape"


def has_bitmask(suffixes: Collection[str]) -> bool:
    """Whether a module whose tensors have these suffixes is stored with a bitmask."""
    return all(suffix in suffixes for suffix in _SUFFIXES)


def with_dense_weights(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with dense weights in place of bitmasks, each expanded when it is read; unchanged
    without bitmasks.

    Raises:
        CheckpointError: tensors are missing or do not fit together. Masks are checked when a weight is read.
    """
    if not _is_of_bitmasks(checkpoint):
        return checkpoint
    tensors: dict[str, TensorInfo] = {}
    computed: dict[str, Callable[[], Tensor]] = {}
    for name, info in checkpoint.tensors.items():
        stem, _, suffix = name.rpartition(".")
        if suffix in _SUFFIXES and f"{stem}.{_KEPT}" not in checkpoint.tensors:
            # Without kept values only a mask is an error: a model may name a tensor "shape" itself.
            if suffix == _MASK or f"{stem}.{_MASK}" in checkpoint.tensors:
                raise CheckpointError(
                    f"{checkpoint.path}: {stem}.{_KEPT}: missing, which a {BITMASK_FORMAT} linear needs"
                )
            tensors[name] = info
        elif suffix == _KEPT:
            n, k = _checked_shape(checkpoint, stem)
            weight = f"{stem}.weight"
            if weight in checkpoint.tensors:
                raise CheckpointError(
                    f"{checkpoint.path}: {weight}: stands beside {stem}.{_KEPT}, which holds the same "
                    "weight; remove one or the other"
                )
            tensors[weight] = replace(info, name=weight, shape=(n, k), nbytes=2 * info.nbytes)
            computed[weight] = _reader(checkpoint, stem)
        elif suffix not in _SUFFIXES:
            tensors[name] = info
    if not computed:
        raise CheckpointError(
            f"{checkpoint.path}: sparsity_config says {BITMASK_FORMAT}, but no tensor ends in .{_KEPT}"
        )
    return DerivedCheckpoint.of(checkpoint, tensors, computed, without_quantization_config(checkpoint.config))


def _is_of_bitmasks(checkpoint: Checkpoint) -> bool:
    """Whether the config says that weights have bitmasks, and are not quantised."""
    raw, _ = config_in(checkpoint.config, str(checkpoint.path / CONFIG))
    if raw is None or raw.get("config_groups"):
        return False
    sparsity = raw.get("sparsity_config")
    return isinstance(sparsity, dict) and sparsity.get("format") == BITMASK_FORMAT


def _checked_shape(checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
    """(N, K) of a linear whose three tensors fit together."""
    where = f"{checkpoint.path}: {stem}"
    parts = {suffix: checkpoint.tensors.get(f"{stem}.{suffix}") for suffix in _SUFFIXES}
    for suffix, info in parts.items():
        if info is None:
            raise CheckpointError(f"{where}.{suffix}: missing, which a {BITMASK_FORMAT} linear needs")
    kept, mask = parts[_KEPT], parts[_MASK]
    assert kept is not None
    assert mask is not None
    if kept.dtype not in FLOATS or len(kept.shape) != 2 or kept.shape[1] % 2:
        raise CheckpointError(
            f"{where}.{_KEPT}: expected floats [N, K/2] with K a multiple of {TWO_OF_FOUR.span}, "
            f"found {kept.dtype} {list(kept.shape)}"
        )
    n, k = kept.shape[0], 2 * kept.shape[1]
    if mask.dtype != "uint8" or mask.shape != (n, -(-k // 8)):
        raise CheckpointError(
            f"{where}.{_MASK}: expected uint8 {[n, -(-k // 8)]}, found {mask.dtype} {list(mask.shape)}"
        )
    return n, k


def _reader(checkpoint: Checkpoint, stem: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        kept, mask, shape = (checkpoint.tensor(f"{stem}.{suffix}") for suffix in _SUFFIXES)
        n, k = kept.shape[0], 2 * kept.shape[1]
        if shape.flatten().tolist() != [n, k]:
            raise CheckpointError(
                f"{checkpoint.path}: {stem}.{_SHAPE}: expected {[n, k]} from {_KEPT}, "
                f"found {shape.flatten().tolist()}"
            )
        bits = mask.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8) & 1
        used = bits.flatten(1).to(torch.bool)
        counts = used[:, :k].reshape(n, -1, TWO_OF_FOUR.span).sum(dim=2)
        if bool(used[:, k:].any()):
            raise CheckpointError(
                f"{checkpoint.path}: {stem}.{_MASK}: expected {k} channels in a row, found bits of others "
                "set; the mask is damaged"
            )
        wrong = counts != TWO_OF_FOUR.kept
        if bool(wrong.any()):
            row, span = divmod(int(wrong.flatten().to(torch.uint8).argmax()), counts.shape[1])
            raise CheckpointError(
                f"{checkpoint.path}: {stem}.{_MASK}: expected 2 kept weights of every 4, found "
                f"{int(counts[row, span])} in row {row} at channel {TWO_OF_FOUR.span * span}; the mask is "
                "damaged"
            )
        weight = torch.zeros(n, k, dtype=kept.dtype)
        weight[used[:, :k]] = kept.flatten()
        return weight

    return read
