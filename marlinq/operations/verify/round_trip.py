"""Checks that unpacking and packing a module gives the stored bits, also through every other format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from marlinq.checkpoint import QuantizedCheckpoint
from marlinq.core.errors import MarlinqError
from marlinq.core.scheme import Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import FORMATS, Layout, ModuleSpec, spec_of
from marlinq.operations.verify.verification_report import Check, Findings


class RoundTrip:
    """The checks of both round trips; modules are added one at a time."""

    def __init__(self, view: QuantizedCheckpoint) -> None:
        self._view = view
        self._own = Findings("round trip")
        self._others = Findings("other formats")
        self._refused: dict[str, str] = {}
        self._held: Counter[str] = Counter()
        self._modules = 0

    def module(self, name: str, spec: ModuleSpec, stored: Mapping[str, Tensor], q: QuantizedWeight) -> None:
        """Checks one module: ``stored`` are its tensors by suffix, ``q`` the weight in them."""
        self._modules += 1
        self._back_to_itself(name, spec, stored, q)
        for form in FORMATS.values():
            reasons = [self._through(layout, name, q) for layout in form.layouts]
            if form is self._view.format or form.sparsity not in (None, q.scheme.sparsity):
                continue
            pairs = zip(form.layouts, reasons, strict=True)
            near = [reason for layout, reason in pairs if _is_of_kind(layout, q.scheme)]
            if None in reasons:
                self._held[form.name] += 1
            elif near and form.read_only is None:
                self._refused.setdefault(form.name, f"{name}: {near[0]}")

    def _through(self, layout: Layout, name: str, q: QuantizedWeight) -> str | None:
        """Packs and unpacks a module; returns why the layout can't hold it, or None."""
        reason = layout.refusal(q)
        if reason is not None or layout is self._view.layouts[name]:
            return reason
        try:
            there = layout.pack(q)
            natural = layout.scale_dtype or q.scheme.scale_dtype
            stored_as = layout.as_stored(replace(q.scheme, scale_dtype=natural))
            difference = q.difference(layout.unpack(there, replace(spec_of(q), scheme=stored_as)))
        except MarlinqError as error:
            difference = str(error)
        if difference is not None:
            self._others.failures.append(f"{name}: through {layout.name} and back: {difference}")
        return None

    def _back_to_itself(
        self, name: str, spec: ModuleSpec, stored: Mapping[str, Tensor], q: QuantizedWeight
    ) -> None:
        layout = self._view.layouts[name]
        reason = layout.refusal(q, spec.scheme.scale_dtype)
        if reason is not None:
            self._own.warnings.append(f"{name}: can be read but not written as {layout.name}: {reason}")
            return
        # The check of zero points reports those that contradict a symmetric config; here they are kept.
        declared = replace(spec.scheme, zero_point="stored") if q.scheme.stores_zeros else spec.scheme
        packed = layout.pack(q, declared)
        for suffix, tensor in stored.items():
            if suffix in layout.read_only:
                continue
            if suffix not in packed or not _same_bits(tensor, packed[suffix]):
                self._own.failures.append(f"{name}.{suffix}: unpacking and packing again changes its bits")

    def results(self) -> list[Check]:
        """The two rows of the report."""
        names = [f"{name} ({count})" for name, count in self._held.items()]
        text = f"bit-identical through {', '.join(names)}" if names else "no other format can hold a module"
        refused = [
            f"{name} can't hold {self._modules - self._held[name]} ({reason})"
            for name, reason in self._refused.items()
        ]
        return [
            self._own.result(f"{self._modules} modules pack to the stored bits"),
            self._others.result("; ".join((text, *refused))),
        ]


def _is_of_kind(layout: Layout, scheme: Scheme) -> bool:
    """Whether a layout is made for weights such as these: that FP8 layouts hold no integers is no news."""
    return scheme.element.name in layout.elements and layout.sparsity in (None, scheme.sparsity)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # As bytes, because NaN is not equal to itself.
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
