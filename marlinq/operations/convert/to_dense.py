"""Convert a quantised or sparse checkpoint to dense weights in the model's own dtype."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlinq.checkpoint import (
    BITMASK_FORMAT,
    Checkpoint,
    CheckpointWriter,
    DerivedCheckpoint,
    QuantizedCheckpoint,
    TensorPlan,
    dequantized,
    without_quantization_config,
)
from marlinq.checkpoint.manifest import fingerprint_of, manifest_of
from marlinq.core.display import counted
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import ConversionRefused
from marlinq.core.progress import ReportProgress
from marlinq.operations.convert.conversion_report import ConversionReport
from marlinq.operations.convert.plan import stored_ties, unknown_tensors

if TYPE_CHECKING:
    import torch
else:
    from marlinq.core.lazy import torch

DENSE = "dense"
"""Value of ``--to`` for a checkpoint without quantised weights."""


def convert_to_dense(
    source: QuantizedCheckpoint,
    out: Path,
    *,
    allow_loss: bool,
    max_shard_size: int,
    progress: ReportProgress,
) -> ConversionReport:
    """Write ``source`` to the folder ``out`` with dense weights.

    Args:
        source: quantised checkpoint.
        out: folder to make.
        allow_loss: whether the model's dtype may round weights; the report then says by how much.
        max_shard_size: bytes of the largest shard.
        progress: called with (activity, steps done, steps in all).

    Raises:
        ConversionRefused: the model's dtype overflows, or rounds a weight although ``allow_loss`` is False;
            nothing was written.
        OutputError: ``out`` can't be written.
    """
    dense = dequantized(source.checkpoint)
    loss = _loss(source, dense.tensors[f"{next(iter(source.modules))}.weight"].dtype, allow_loss, progress)
    config, notes = stored_ties(source)
    manifest = {
        "source_format": source.format.name,
        "allow_loss": allow_loss,
        "source_quantization_config": dict(source.config.raw),
    }
    return _write(
        source.checkpoint,
        replace(dense, config=without_quantization_config(config)),
        out,
        manifest,
        notes=(*unknown_tensors(source.checkpoint, source), *notes, *([] if loss is None else [loss])),
        lossy=loss is not None,
        max_shard_size=max_shard_size,
        progress=progress,
    )


def convert_bitmasks(
    dense: DerivedCheckpoint, out: Path, *, max_shard_size: int, progress: ReportProgress
) -> ConversionReport:
    """Write the 16-bit weights of a checkpoint that stores only its nonzero weights and a bitmask.

    Args:
        dense: the checkpoint seen with dense weights, from :func:`~marlinq.checkpoint.with_dense_weights`.
        out, max_shard_size, progress: as in :func:`convert_to_dense`.

    Raises:
        CheckpointError: a mask is damaged.
        OutputError: ``out`` can't be written.
    """
    manifest = {"source_format": BITMASK_FORMAT}
    return _write(
        dense.base,
        dense,
        out,
        manifest,
        notes=tuple(unknown_tensors(dense, None)),
        max_shard_size=max_shard_size,
        progress=progress,
    )


def _write(
    stored: Checkpoint,
    dense: Checkpoint,
    out: Path,
    facts: Mapping[str, Any],
    *,
    notes: tuple[str, ...] = (),
    lossy: bool = False,
    max_shard_size: int,
    progress: ReportProgress,
) -> ConversionReport:
    """Writes every tensor of ``dense``, a view that computes its tensors from the files of ``stored``.

    ``facts`` go into the manifest.
    """
    started = time.monotonic()
    plans = [TensorPlan(info.name, info.dtype, info.shape) for info in dense.tensors.values()]
    manifest = manifest_of("convert", format=DENSE, **facts)
    fingerprint = fingerprint_of(stored, max_shard_size, manifest)
    computed = [plan.name for plan in plans if dense.computes(plan.name)]
    with CheckpointWriter(
        out, plans, fingerprint=fingerprint, max_shard_bytes=max_shard_size, resume=True
    ) as writer:
        resumed = len(writer.written)
        for done, plan in enumerate(plans):
            progress("converting", done, len(plans))
            if plan.name not in writer.written:
                writer.write(plan.name, dense.tensor(plan.name))
                writer.commit()
        stored.check_unchanged()
        writer.finish(
            config=dense.config,
            manifest=manifest,
            side_files_from=stored,
            extra_json={},
        )
    return ConversionReport(
        source=str(stored.path),
        out=str(out),
        source_format=str(facts["source_format"]),
        target_format=DENSE,
        converted=len(computed),
        skipped={},
        carried=len(plans) - len(computed),
        side_files=tuple(stored.side_files),
        left_out=tuple(stored.left_out),
        lossy=lossy,
        notes=notes,
        resumed=resumed,
        source_bytes=stored.nbytes,
        out_bytes=sum(plan.nbytes for plan in plans),
        seconds=time.monotonic() - started,
    )


def _loss(source: QuantizedCheckpoint, dtype: str, allow_loss: bool, progress: ReportProgress) -> str | None:
    """A sentence about the modules whose weights ``dtype`` rounds; None where it holds every weight exactly.

    Raises:
        ConversionRefused: a weight overflows ``dtype``, or is rounded although ``allow_loss`` is False.
    """
    worst, name, rounded = 0.0, "", 0
    for done, module in enumerate(source.modules):
        progress("checking", done, len(source.modules))
        wide = source.load(module).dequantize()
        kept = wide.to(torch_dtype(dtype)).to(torch.float32)
        if not bool(torch.isfinite(kept).all()):
            raise ConversionRefused(
                f"{source.checkpoint.path}: {module}: its dequantised weights overflow {dtype}, the "
                "dtype that config.json names"
            )
        if torch.equal(kept, wide):
            continue
        if not allow_loss:
            raise ConversionRefused(
                f"{source.checkpoint.path}: {module}: {dtype} rounds its dequantised weights; --allow-loss "
                "converts it nevertheless"
            )
        rounded += 1
        error = float((kept - wide).norm() / wide.norm())
        if error > worst:
            worst, name = error, module
    if not rounded:
        return None
    modules = counted(rounded, "modules")
    return f"{dtype} rounds the weights of {modules}; {name} most, by {worst:.2g} of its norm"
