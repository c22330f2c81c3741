"""Reads the small tensors of a quantised linear without importing torch, which takes seconds.

Three questions of ``inspect`` are answered: are all zero points the middle code, is the g_idx in order, and
may a scale break the rules of :mod:`marlinq.formats.stored_values`?
Where a layout does not describe its tensors for this (:attr:`marlinq.formats.Layout.plain` is None), the
layout's own code decodes them, with torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlinq.checkpoint import QuantizedCheckpoint
from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.formats import ModuleSpec
from marlinq.formats.stored_values import IMPOSSIBLE, VANISHING, largest_weight


@dataclass(frozen=True)
class StoredFacts:
    """Facts from the zeros and the g_idx of one linear.

    Attributes:
        symmetric: whether every zero point is the middle code; None where they can't be decoded.
        in_order: whether channel k belongs to group ``k // group_size``; None where it can't be read.
        sortable: whether the sorted g_idx is ``k // group_size``.
        problem: reason why the zeros can't be decoded, or a scale that breaks a rule; or None.
    """

    symmetric: bool | None
    in_order: bool | None
    sortable: bool
    problem: str | None = None


def stored_facts(quantized: QuantizedCheckpoint, module: str) -> StoredFacts:
    """The facts of ``module``. The caller has checked the names, shapes and dtypes of its tensors.

    Raises:
        CheckpointError: the values of its g_idx or of its stored shape contradict the other tensors.
    """
    plain, spec = quantized.layouts[module].plain, quantized.modules[module]
    if plain is None:
        return _decoded(quantized, module)
    names = quantized.tensor_names(module)
    symmetric, in_order, sortable = True, True, True
    if plain.shape in names:
        shape = _read(quantized, names[plain.shape]).tolist()
        if shape != [spec.out_features, spec.in_features]:
            wanted = f"expected [{spec.out_features}, {spec.in_features}] from the codes"
            raise CheckpointError(f"{_place(quantized, module)}: {plain.shape}: {wanted}, found {shape}")
    if plain.zeros in names:
        element = spec.scheme.element
        words = _read(quantized, names[plain.zeros]) & 0xFFFFFFFF
        if plain.less and _any_slot(words, element.bits, element.codes - plain.less):
            # A slot holds the code of "zero point 0 minus 1", which wraps: its meaning depends on the writer.
            return _decoded(quantized, module)
        symmetric = bool((words == _word(element.midpoint - plain.less, element.bits)).all())
        if not (symmetric or quantized.layouts[module].as_stored(spec.scheme).stores_zeros):
            # The config says symmetric: the layout itself judges whether that can be read.
            return _decoded(quantized, module)
        beside = [_word(element.midpoint - plain.less + step, element.bits) for step in (-1, 1)]
        if words.size and words[0] in beside and bool((words == words[0]).all()):
            # One off the middle everywhere: only the codes tell whether another format's zeros are meant.
            return _decoded(quantized, module)
    if _may_break_a_rule(quantized, module):
        return _decoded(quantized, module)
    if plain.order in names:
        where = f"{_place(quantized, module)}.{plain.order}"
        in_order, sortable = _order(_read(quantized, names[plain.order]), spec, where)
        if not sortable:
            return _decoded(quantized, module)
    return StoredFacts(symmetric, in_order, sortable)


def _decoded(quantized: QuantizedCheckpoint, module: str) -> StoredFacts:
    try:
        grid = quantized.load_grid(module)
    except (CheckpointError, ConversionRefused) as refusal:
        # inspect still describes the rest of the checkpoint.
        return StoredFacts(None, None, False, str(refusal).removeprefix(f"{_place(quantized, module)}: "))
    symmetric = not grid.scheme.stores_zeros
    in_order, sortable = _order(grid.g_idx.numpy(), quantized.modules[module], _place(quantized, module))
    return StoredFacts(symmetric, in_order, sortable)


def _may_break_a_rule(quantized: QuantizedCheckpoint, module: str) -> bool:
    """Whether a scale is outside the range in which no rule can be broken; :func:`_decoded` then decides."""
    layout, element = quantized.layouts[module], quantized.modules[module].scheme.element
    name = f"{module}.{layout.scale_key}"
    info = quantized.checkpoint.tensors[name]
    if info.dtype == "bfloat16":
        # Its bits are the upper half of a float32's.
        magnitudes = np.abs((_stored(quantized, name, "uint16").astype(np.uint32) << 16).view(np.float32))
    else:
        magnitudes = np.abs(_stored(quantized, name, info.dtype))
    low, high = float(magnitudes.min()), float(magnitudes.max())
    factor = largest_weight(element)
    # Negated, so that NaN, for which no comparison holds, is outside too.
    return not (low * factor >= VANISHING and high * factor <= IMPOSSIBLE)


def _order(g_idx: NDArray[np.int64], spec: ModuleSpec, where: str) -> tuple[bool, bool]:
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= spec.groups:
        raise CheckpointError(f"{where}: expected values in 0..{spec.groups - 1}, found {low}..{high}")
    trivial = np.arange(spec.in_features) // spec.channels_per_group
    return bool((g_idx == trivial).all()), bool((np.sort(g_idx) == trivial).all())


def _word(code: int, bits: int) -> int:
    """The 32-bit word with ``code`` in every slot of ``bits`` bits."""
    return sum(code << shift for shift in range(0, 32, bits))


def _any_slot(words: NDArray[np.int64], bits: int, code: int) -> bool:
    return any(bool((((words >> shift) & ((1 << bits) - 1)) == code).any()) for shift in range(0, 32, bits))


def _read(quantized: QuantizedCheckpoint, name: str) -> NDArray[np.int64]:
    """A stored integer tensor as int64 [elements]."""
    return _stored(quantized, name, quantized.checkpoint.tensors[name].dtype).astype(np.int64)


def _stored(quantized: QuantizedCheckpoint, name: str, dtype: str) -> NDArray[Any]:
    """A stored tensor as ``dtype`` [elements], which has the stored dtype's width."""
    info = quantized.checkpoint.tensors[name]
    file = quantized.checkpoint.files[info.shard]
    data = bytearray(info.nbytes)
    if not file.read_into(memoryview(data), info.offset):
        raise CheckpointError(f"{file.path}: tensor {name} ends early; the file was truncated")
    return np.frombuffer(data, dtype)


def _place(quantized: QuantizedCheckpoint, module: str) -> str:
    return f"{quantized.checkpoint.path}: {module}"
