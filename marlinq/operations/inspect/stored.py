"""What the small stored tensors of a quantised linear say, read without torch, which takes seconds to import.

Only the questions that ``inspect`` asks are answered: are all zero points the midpoint, and is the g_idx in
order. Where a layout does not say how to tell (:attr:`marlinq.formats.Layout.plain`), its own code decodes
the tensors, with torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marlinq.checkpoint import QuantizedCheckpoint
from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.formats import ModuleSpec


@dataclass(frozen=True)
class StoredFacts:
    """What the zeros and the g_idx of one linear say.

    Attributes:
        symmetric: every zero point is the midpoint; None where they can't be decoded.
        in_order: channel k belongs to group ``k // group_size``; None where that could not be read.
        sortable: sorting the g_idx gives that.
        problem: reason why the zeros can't be decoded, or None.
    """

    symmetric: bool | None
    in_order: bool | None
    sortable: bool
    problem: str | None = None


def stored_facts(quantized: QuantizedCheckpoint, module: str) -> StoredFacts:
    """The facts of ``module``, whose stored names, shapes and dtypes have been checked.

    Raises:
        CheckpointError: a g_idx or a stored shape contradicts the others.
    """
    plain, spec = quantized.layouts[module].plain, quantized.modules[module]
    if plain is None:
        return _decoded(quantized, module)
    found = quantized.tensor_names(module)
    symmetric, in_order, sortable = True, True, True
    if plain.shape in found:
        shape = _read(quantized, found[plain.shape]).tolist()
        if shape != [spec.out_features, spec.in_features]:
            wanted = f"expected [{spec.out_features}, {spec.in_features}] from the codes"
            raise CheckpointError(f"{_place(quantized, module)}: {plain.shape}: {wanted}, found {shape}")
    if plain.zeros in found:
        element = spec.scheme.element
        words = _read(quantized, found[plain.zeros]) & 0xFFFFFFFF
        if plain.less and _any_slot(words, element.bits, element.codes - plain.less):
            # A zero point below the least that can be stored: who wrote it decides what it means.
            return _decoded(quantized, module)
        symmetric = bool((words == _word(element.midpoint - plain.less, element.bits)).all())
        beside = [_word(element.midpoint - plain.less + step, element.bits) for step in (-1, 1)]
        if words.size and words[0] in beside and bool((words == words[0]).all()):
            # The codes decide whether these are zero points of another format.
            return _decoded(quantized, module)
    if plain.order in found:
        where = f"{_place(quantized, module)}.{plain.order}"
        in_order, sortable = _order(_read(quantized, found[plain.order]), spec, where)
    return StoredFacts(symmetric, in_order, sortable)


def _decoded(quantized: QuantizedCheckpoint, module: str) -> StoredFacts:
    try:
        grid = quantized.load_grid(module)
    except (CheckpointError, ConversionRefused) as refusal:
        # Undecodable zeros don't keep the rest of the checkpoint from being described.
        return StoredFacts(None, None, False, str(refusal).removeprefix(f"{_place(quantized, module)}: "))
    symmetric = not grid.scheme.stores_zeros
    in_order, sortable = _order(grid.g_idx.numpy(), quantized.modules[module], _place(quantized, module))
    return StoredFacts(symmetric, in_order, sortable)


def _order(g_idx: NDArray[np.int64], spec: ModuleSpec, where: str) -> tuple[bool, bool]:
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= spec.groups:
        raise CheckpointError(f"{where}: expected values in 0..{spec.groups - 1}, found {low}..{high}")
    trivial = np.arange(spec.in_features) // spec.channels_per_group
    return bool((g_idx == trivial).all()), bool((np.sort(g_idx) == trivial).all())


def _word(code: int, bits: int) -> int:
    """The word whose every slot holds ``code``."""
    return sum(code << shift for shift in range(0, 32, bits))


def _any_slot(words: NDArray[np.int64], bits: int, code: int) -> bool:
    return any(bool((((words >> shift) & ((1 << bits) - 1)) == code).any()) for shift in range(0, 32, bits))


def _read(quantized: QuantizedCheckpoint, name: str) -> NDArray[np.int64]:
    """A stored integer tensor, flat."""
    info = quantized.checkpoint.tensors[name]
    file = quantized.checkpoint.files[info.shard]
    data = bytearray(info.nbytes)
    if not file.read_into(memoryview(data), info.offset):
        raise CheckpointError(f"{file.path}: tensor {name} ends early; the file was truncated")
    return np.frombuffer(data, info.dtype).astype(np.int64)


def _place(quantized: QuantizedCheckpoint, module: str) -> str:
    return f"{quantized.checkpoint.path}: {module}"
