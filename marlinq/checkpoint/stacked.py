"""Read and write stacks, tensors with all experts of a layer, as separate parts
(:mod:`marlinq.formats.stacks`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from marlinq.checkpoint.derived import DerivedCheckpoint
from marlinq.checkpoint.header import TensorInfo, TensorPlan
from marlinq.checkpoint.reader import Checkpoint
from marlinq.checkpoint.writer import CheckpointWriter
from marlinq.core.dtypes import ITEM_BYTES, torch_dtype
from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.formats.stacks import STACKED_BIAS, StackPart, is_stack, part_named, parts_of, stack_refusal

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch

_MOST_EXPERTS = 1 << 14


def with_parts(checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` with a tensor for every part instead of stacks, each read on demand.

    Raises:
        CheckpointError: a stack has another dtype or shape than its name promises.
    """
    tensors: dict[str, TensorInfo] = {}
    computed: dict[str, Callable[[], Tensor]] = {}

    def reader(part: StackPart) -> Callable[[], Tensor]:
        return lambda: part.taken(checkpoint.part(part.stack, part.expert))

    for name, info in checkpoint.tensors.items():
        if not is_stack(name):
            tensors[name] = info
            continue
        reason = stack_refusal(name, info.dtype, info.shape)
        if reason is None and info.shape[0] > _MOST_EXPERTS:
            reason = f"{name}: expected at most {_MOST_EXPERTS} experts, found {info.shape[0]}"
        if reason is not None:
            raise CheckpointError(f"{checkpoint.path}: {reason}")
        for part in parts_of(name, info.shape[0]):
            shape = part.taken_shape(info.shape)
            nbytes = shape[0] * shape[1] * ITEM_BYTES[info.dtype]
            tensors[part.name] = replace(info, name=part.name, shape=shape, nbytes=nbytes)
            computed[part.name] = reader(part)
    return DerivedCheckpoint.of(checkpoint, tensors, computed, checkpoint.config)


class StackingWriter(CheckpointWriter):
    """Writes a folder whose plan names parts; a stack is kept in memory until its last part is written.

    Arguments are those of :class:`CheckpointWriter`. Call :func:`check_stacks` with ``plan`` before.
    """

    def stored(self, plan: Sequence[TensorPlan]) -> Sequence[TensorPlan]:
        whole, self._parts = _stacked(plan)
        self._members: dict[str, set[str]] = {}
        for part in self._parts.values():
            self._members.setdefault(part.stack, set()).add(part.name)
        self._filling: dict[str, tuple[Tensor, set[str]]] = {}
        self._lock = threading.Lock()
        return whole

    @property
    def written(self) -> set[str]:
        names = super().written
        return names | {name for stack in names for name in self._members.get(stack, ())}

    def write(self, name: str, tensor: Tensor) -> None:
        part = self._parts.get(name)
        if part is None:
            super().write(name, tensor)
            return
        with self._lock:
            if part.stack not in self._filling:
                info = self.tensors[part.stack]
                empty = torch.empty(info.shape, dtype=torch_dtype(info.dtype))
                self._filling[part.stack] = empty, set(self._members[part.stack])
            stack, missing = self._filling[part.stack]
            part.put(stack, tensor)
            missing.discard(name)
            if missing:
                return
            del self._filling[part.stack]
        super().write(part.stack, stack)

    def read_back(self, name: str) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return super().read_back(name)
        with self._lock:
            filling = self._filling.get(part.stack)
            if filling is not None:
                return part.taken(filling[0][part.expert])
        return part.taken(super().read_back(part.stack)[part.expert])


def check_stacks(plan: Sequence[TensorPlan]) -> None:
    """Check that all parts of every stack are planned, and that the model is of GPT-OSS's family.

    Raises:
        ConversionRefused: a part is missing, or the model is of another family; the message names the tensor.
    """
    names = {tensor.name for tensor in plan}
    for stack, count in _experts(plan).items():
        missing = next((part.name for part in parts_of(stack, count) if part.name not in names), None)
        if missing is not None:
            raise ConversionRefused(f"gpt-oss: {stack} needs {missing}, which is not quantised")
        bias = f"{stack.rpartition('.')[0]}.{STACKED_BIAS}"
        if bias not in names:
            raise ConversionRefused(
                f"gpt-oss: there is no {bias}; only models of GPT-OSS hold experts in this format"
            )


def _experts(plan: Sequence[TensorPlan]) -> dict[str, int]:
    """Number of experts of every stack."""
    counts: dict[str, int] = {}
    for tensor in plan:
        part = part_named(tensor.name)
        if part is not None:
            counts[part.stack] = max(counts.get(part.stack, 0), part.expert + 1)
    return counts


def _stacked(plan: Sequence[TensorPlan]) -> tuple[list[TensorPlan], dict[str, StackPart]]:
    """``plan`` where each stack replaces its parts, at the position of the first; and the parts by name."""
    experts = _experts(plan)
    parts: dict[str, StackPart] = {}
    whole: dict[str, TensorPlan] = {}
    for tensor in plan:
        part = part_named(tensor.name)
        if part is None:
            whole[tensor.name] = tensor
            continue
        parts[part.name] = part
        if part.stack not in whole:
            shape = part.stack_shape(tensor.shape, experts[part.stack])
            whole[part.stack] = TensorPlan(part.stack, tensor.dtype, shape)
    return list(whole.values()), parts
