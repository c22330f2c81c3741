"""Checks of sparse weights before a conversion: read from codes and masks, not from headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from marlinq.checkpoint import QuantizedCheckpoint
from marlinq.core.errors import ConversionRefused
from marlinq.core.progress import ReportProgress
from marlinq.formats import Format, ModuleSpec


def with_sparsity(
    source: QuantizedCheckpoint, target: Format, specs: Mapping[str, ModuleSpec], progress: ReportProgress
) -> dict[str, ModuleSpec]:
    """``specs`` with the sparsity pattern of ``target`` (None for a dense format) in every scheme.

    Modules are read only where their codes matter: for a sparse target, and where the source stores a mask.

    Raises:
        ConversionRefused: a module's zeros don't follow the target's pattern.
        CheckpointError: a mask is damaged.
    """
    wanted = target.sparsity
    sparse: dict[str, ModuleSpec] = {}
    for done, (name, spec) in enumerate(specs.items()):
        if wanted is not None and spec.scheme.element.table is not None:
            sparse[name] = spec  # pruning would not help: the target is refused for holding integers alone
            continue
        if wanted is not None or source.layouts[name].mask_key is not None:
            progress("checking masks", done, len(specs))
            used = source.load(name).used()
            if wanted is not None and (reason := wanted.refusal(used)) is not None:
                raise ConversionRefused(
                    f"{source.checkpoint.path}: {name}: {target.name} holds {wanted.describe()} weights "
                    f"only, and {reason}; quantize --sparsity {wanted.name} makes such weights"
                )
        sparse[name] = replace(spec, scheme=replace(spec.scheme, sparsity=wanted))
    return sparse
