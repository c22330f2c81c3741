"""Unpacking and packing again must give the stored bits; so must the way through every other layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from marlinq.checkpoint import QuantizedCheckpoint
from marlinq.core.errors import MarlinqError
from marlinq.formats import FORMATS, ModuleSpec, QuantizedTensor, spec_of
from marlinq.operations.verify.report import Check, Findings


class RoundTrip:
    """Collects both checks, a module at a time."""

    def __init__(self, view: QuantizedCheckpoint) -> None:
        self._view = view
        self._own = Findings("round trip")
        self._others = Findings("other formats")
        self._refused: dict[str, str] = {}
        self._held: dict[str, int] = {}
        self._modules = 0

    def module(self, name: str, spec: ModuleSpec, stored: Mapping[str, Tensor], q: QuantizedTensor) -> None:
        """Check one module; ``stored`` are its tensors by suffix and ``q`` is their tuple."""
        self._modules += 1
        self._back_to_itself(name, spec, stored, q)
        for layout in FORMATS.values():
            if layout is self._view.format:
                continue
            reason = layout.refusal(q)
            if reason is not None:
                self._refused.setdefault(layout.name, f"{name}: {reason}")
                continue
            self._held[layout.name] = self._held.get(layout.name, 0) + 1
            try:
                there = layout.pack(q)
                suffix = next(suffix for suffix in ("scales", "s", "weight_scale") if suffix in there)
                wanted = replace(spec_of(q), scale_dtype=there[suffix].dtype)
                difference = q.difference(layout.unpack(there, wanted))
            except MarlinqError as error:
                difference = str(error)
            if difference is not None:
                self._others.failures.append(f"{name}: through {layout.name} and back: {difference}")

    def _back_to_itself(
        self, name: str, spec: ModuleSpec, stored: Mapping[str, Tensor], q: QuantizedTensor
    ) -> None:
        layout = self._view.format
        reason = layout.refusal(q, spec.scale_dtype)
        if reason is not None:
            self._own.warnings.append(f"{name}: can be read but not written as {layout.name}: {reason}")
            return
        packed = layout.pack(q, spec.scale_dtype, spec.symmetric and q.symmetric)
        for suffix, tensor in stored.items():
            if suffix == "weight_g_idx":  # read from old writers, never written
                continue
            if suffix not in packed or not _same_bits(tensor, packed[suffix]):
                self._own.failures.append(f"{name}.{suffix}: unpacking and packing again changes its bits")

    def results(self) -> list[Check]:
        """The two rows."""
        names = [f"{name} ({count})" for name, count in self._held.items()]
        text = f"bit-identical through {', '.join(names)}" if names else "no other layout can hold a module"
        refused = [
            f"{name} can't hold {self._modules - self._held.get(name, 0)} ({reason})"
            for name, reason in self._refused.items()
        ]
        return [
            self._own.result(f"{self._modules} modules pack to the stored bits"),
            self._others.result("; ".join((text, *refused))),
        ]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As bytes: NaN is not equal to itself.
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
