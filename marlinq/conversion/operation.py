"""The convert operation."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from marlinq import __version__
from marlinq.checkpoint import (
    DEFAULT_MAX_SHARD_BYTES,
    MANIFEST,
    Checkpoint,
    CheckpointWriter,
    QuantizedCheckpoint,
    extra_configs,
    replace_quantization_config,
)
from marlinq.checkpoint.reader import read_json
from marlinq.conversion.plan import ConversionPlan, Progress, plan_conversion
from marlinq.conversion.report import ConversionReport
from marlinq.errors import OutputError, UnsupportedError, UsageError
from marlinq.formats import FORMATS, transcode

_COMMIT_BYTES = 1 << 30


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target_format: str,
    source_format: str | None = None,
    strict_marlin: bool = False,
    skip_unsupported: bool = False,
    max_shard_size: int = DEFAULT_MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a quantised checkpoint to another layout, lossless bit for bit.

    Everything that could make a conversion lossy is looked for before the output folder is touched. Then
    tensors stream one by one. A run that was interrupted continues when it is repeated.

    Args:
        source: a checkpoint folder or Hub id.
        out: the folder to make; it must not exist.
        target_format, source_format: names in :data:`marlinq.formats.FORMATS`; the source's is detected, and
            checked where it is given.
        strict_marlin: allow in marlin only what its original kernel takes (K%128, N%256, group 128 or -1).
        skip_unsupported: dequantise modules of shapes that the target excludes, instead of refusing.
        max_shard_size: largest shard in bytes.
        progress: called with ("checking" or "converting", modules done, modules in all).

    Raises:
        ConversionRefused: the target can't hold a module without loss; nothing was written.
        CheckpointError, UnsupportedError: the source is damaged, contradictory or of an unknown kind.
        UsageError: the formats named don't fit the source or each other.
        OutputError: ``out`` exists or can't be written.
    """
    started = time.monotonic()
    quantized = _open(source, source_format, target_format, strict_marlin)
    checkpoint, out = quantized.checkpoint, Path(out)
    if out.exists():
        raise OutputError(f"{out}: already exists; choose another output folder or remove it")
    plan = plan_conversion(
        quantized,
        FORMATS[target_format],
        strict_marlin=strict_marlin,
        skip_unsupported=skip_unsupported,
        progress=progress,
    )
    manifest = _manifest(plan, strict_marlin, skip_unsupported)
    options = json.dumps([checkpoint.identity(), max_shard_size, manifest], sort_keys=True)
    fingerprint = hashlib.sha256(options.encode()).hexdigest()
    with CheckpointWriter(
        out, plan.tensors, fingerprint=fingerprint, max_shard_bytes=max_shard_size, resume=True
    ) as writer:
        resumed = len(writer.written)
        _write(plan, writer, progress)
        writer.finish(
            config=replace_quantization_config(checkpoint.config, plan.quantization_config),
            manifest=manifest,
            side_files_from=checkpoint,
            extra_json=extra_configs(target_format, plan.quantization_config),
        )
    return ConversionReport(
        source=str(checkpoint.path),
        out=str(out),
        source_format=quantized.format.name,
        target_format=target_format,
        converted=len(plan.modules),
        skipped=plan.skipped,
        carried=len(quantized.passthrough),
        side_files=tuple(checkpoint.side_files),
        left_out=tuple(checkpoint.left_out),
        notes=plan.notes,
        resumed=resumed,
        source_bytes=checkpoint.nbytes,
        out_bytes=sum(tensor.nbytes for tensor in plan.tensors),
        seconds=time.monotonic() - started,
    )


def _open(
    source: str | os.PathLike[str], source_format: str | None, target_format: str, strict_marlin: bool
) -> QuantizedCheckpoint:
    for name in (source_format, target_format):
        if name is not None and name not in FORMATS:
            raise UsageError(f"convert: unknown format {name!r}; expected one of {', '.join(FORMATS)}")
    if strict_marlin and target_format != "marlin":
        raise UsageError(f"convert: --strict-marlin only goes with the target marlin, not {target_format}")
    checkpoint = Checkpoint.open(source)
    quantized = QuantizedCheckpoint.of(checkpoint)
    if quantized is None:
        raise UnsupportedError(f"{checkpoint.path}: is not quantised; use marlinq quantize")
    found = quantized.format.name
    if source_format not in (None, found):
        raise UsageError(f"{checkpoint.path}: expected a {source_format} checkpoint, found {found}")
    if found == target_format:
        raise UsageError(f"{checkpoint.path}: is in the {found} layout already; copy the folder instead")
    return quantized


def _manifest(plan: ConversionPlan, strict_marlin: bool, skip_unsupported: bool) -> dict[str, Any]:
    checkpoint = plan.source.checkpoint
    before = None
    if (checkpoint.path / MANIFEST).exists():
        before = read_json(checkpoint.path, MANIFEST)
        # Hashes and fingerprint describe the tensors of that folder, not what was decided for it.
        before = {key: value for key, value in before.items() if key not in ("tensors", "fingerprint")}
    return {
        "marlinq": __version__,
        "operation": "convert",
        "source_format": plan.source.format.name,
        "format": plan.target.name,
        "strict_marlin": strict_marlin,
        "skip_unsupported": skip_unsupported,
        "skipped": {item.module: item.reason for item in plan.skipped},
        "scale_dtypes": sorted({str(spec.scale_dtype) for spec in plan.modules.values()}),
        "source_quantization_config": dict(plan.source.config.raw),
        "source": before,
    }


def _write(plan: ConversionPlan, writer: CheckpointWriter, progress: Progress | None) -> None:
    source, checkpoint = plan.source, plan.source.checkpoint
    written = writer.written
    carried = set(source.passthrough)
    uncommitted = done = 0
    for name, info in checkpoint.tensors.items():
        module, _, suffix = name.rpartition(".")
        if name in carried:
            if name not in written:
                writer.write(name, checkpoint.tensor(name))
        elif suffix == source.format.key:
            _write_module(plan, writer, module, written)
            done += 1
            if progress is not None:
                progress("converting", done, len(source.modules))
        uncommitted += info.nbytes
        if uncommitted >= _COMMIT_BYTES:
            writer.commit()
            uncommitted = 0


def _write_module(plan: ConversionPlan, writer: CheckpointWriter, module: str, written: set[str]) -> None:
    source, target = plan.source, plan.target
    spec = plan.modules.get(module)
    if spec is None:
        if f"{module}.weight" not in written:
            weight = source.load(module).dequantize(plan.weight_dtype)
            writer.write(f"{module}.weight", weight.t() if plan.transposed else weight)
        return
    if all(f"{module}.{suffix}" in written for suffix in target.expected(spec)):
        return
    grid = source.load_grid(module)
    for suffix, tensor in target.pack_grid(grid, spec.scale_dtype, spec.symmetric).items():
        writer.write(f"{module}.{suffix}", tensor)
    words = source.checkpoint.tensor(f"{module}.{source.format.key}")
    writer.write(f"{module}.{target.key}", transcode(words, spec, source.format, target))
