"""Writes quantised modules to the output folder, reads them back, and puts them into the loaded model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from marlinq.checkpoint import CheckpointWriter, WriteBehind, model_dtype
from marlinq.core.errors import NumericsError
from marlinq.core.weight import QuantizedWeight
from marlinq.formats.stored_values import has_coarse_scales, largest_weight, scales_fault
from marlinq.models import ModelInstance
from marlinq.operations.quantize.batches_of_modules import in_module_batches
from marlinq.operations.quantize.planned_module import PlannedModule, module_note
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.quantize_report import ModuleReport
from marlinq.operations.quantize.ranks import Ranks

_BYTES_AT_ONCE = 1 << 29
"""bytes of packed tensors after which they are handed to the writer's thread"""


class ModuleWriter:
    """Packs solved modules and hands them to a thread that writes them; a context manager.

    Args:
        plan: layout and stored names of every module.
        writer: writer of the folder.
        instance: the loaded model.
        ranks: processes that share the run; the first one writes.
    """

    def __init__(
        self, plan: OutputPlan, writer: CheckpointWriter, instance: ModelInstance, ranks: Ranks
    ) -> None:
        self._plan = plan
        self._writer = writer
        self._instance = instance
        self._ranks = ranks
        self._behind = WriteBehind(writer, instance.device)
        self._waiting: dict[str, Tensor] = {}
        self._coarse: list[str] = []

    def __enter__(self) -> ModuleWriter:
        self._behind.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._behind.__exit__(kind, error, trace)
        if self._coarse and error is None:
            more = f" and {len(self._coarse) - 1} more" if len(self._coarse) > 1 else ""
            warnings.warn(
                f"{self._coarse[0]}{more}: weights are too small for scales in float16, and lost "
                "precision; take --format compressed-tensors and a model in bfloat16, or skip them "
                "with an override",
                stacklevel=2,
            )

    def add(self, planned: PlannedModule, solved: QuantizedWeight, report: ModuleReport) -> dict[str, Any]:
        """Packs a module on the first rank, and returns the note to commit with it.

        Raises:
            NumericsError: as :func:`packed`.
        """
        note = {module_note(planned): asdict(report)}
        if not self._ranks.first:
            return note
        self._waiting |= packed(self._plan, planned, solved)
        if has_coarse_scales(solved):
            self._coarse.append(planned.projection.name)
        if sum(tensor.nbytes for tensor in self._waiting.values()) > _BYTES_AT_ONCE:
            self.commit({})
        return note

    def commit(self, notes: Mapping[str, Any]) -> None:
        """Hands the packed tensors to the writer's thread, with the notes of completed modules."""
        self._behind.write(self._waiting, notes)
        self._waiting = {}

    def read_back(self, planned: PlannedModule) -> QuantizedWeight:
        """A written module, on every rank."""
        stored = None
        if self._ranks.first:
            names = self._plan.tensor_names(planned)
            tensors = {suffix: self._writer.read_back(name) for suffix, name in names.items()}
            stored = planned.layout.unpack(tensors, planned.spec)
        return self._ranks.share_weight(stored, planned.spec, 0)


def packed(plan: OutputPlan, planned: PlannedModule, solved: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors of a module by their names in the output.

    Raises:
        NumericsError: a scale breaks a rule of :mod:`marlinq.formats.stored_values`, so that no command would
            read the result; or a weight overflows the model's dtype.
    """
    fault = scales_fault(solved, lambda: solved.codes) or _overflow(solved, model_dtype(plan.config))
    if fault is not None:
        raise NumericsError(
            f"{planned.projection.name}: {fault}; check the source checkpoint, or skip it with an override"
        )
    tensors = planned.layout.pack(solved, planned.spec.scheme)
    return {f"{planned.stored}.{suffix}": tensor for suffix, tensor in tensors.items()}


def _overflow(solved: QuantizedWeight, dtype: str | None) -> str | None:
    """What is wrong with a weight of a float16 model that rounding moved beyond float16; or None."""
    if dtype != "float16":
        # The others hold every weight that scales_fault lets pass.
        return None
    second = 1.0 if solved.tensor_scale is None else float(solved.tensor_scale)
    reach = largest_weight(solved.element, second, divides=solved.tensor_scale_divides)
    if solved.scheme.stores_zeros:
        reach = solved.element.codes - 1
    if float(solved.scales.float().abs().max()) * reach <= torch.finfo(torch.float16).max:
        return None
    stored = solved.dequantize()
    if bool(stored.to(torch.float16).isfinite().all()):
        return None
    return f"a weight is rounded to {float(stored.abs().max()):.6g}, which overflows the model's float16"


def install(instance: ModelInstance, planned: PlannedModule, quantized: QuantizedWeight) -> None:
    """Replaces a projection's weight in the loaded model by its dequantised weight, as loaders of the output
    will see it."""
    weight = quantized.to(instance.device).dequantize(instance.dtype)
    instance.replace(planned.projection, weight)


def install_all(instance: ModelInstance, solved: Sequence[tuple[PlannedModule, QuantizedWeight]]) -> None:
    """:func:`install` for many weights, in one operation for all of one shape."""
    for batch in in_module_batches(solved):
        dense = batch.weight.to(instance.device).dequantize(instance.dtype)
        for planned, weight in zip(batch.items, dense.chunk(len(batch.items)), strict=True):
            instance.replace(planned.projection, weight)
