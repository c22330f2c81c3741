"""The convert operation."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlinq.checkpoint import (
    BITMASK_FORMAT,
    DEFAULT_MAX_SHARD_BYTES,
    MANIFEST,
    Checkpoint,
    CheckpointWriter,
    DerivedCheckpoint,
    QuantizedCheckpoint,
    StackingWriter,
    check_place,
    replace_quantization_config,
    with_dense_weights,
)
from marlinq.checkpoint.manifest import fingerprint_of, manifest_of
from marlinq.checkpoint.reader import read_json
from marlinq.core.dtypes import ITEM_BYTES, torch_dtype
from marlinq.core.errors import UnsupportedError, UsageError
from marlinq.core.progress import Progress, ReportProgress, shows_progress
from marlinq.core.schemes import SCHEMES, NamedScheme
from marlinq.formats import FORMATS, Format, transcode
from marlinq.formats.dialects import DIALECTS
from marlinq.formats.stored_values import nan_codes
from marlinq.operations.convert.conversion_report import ConversionReport
from marlinq.operations.convert.plan import ConversionPlan, plan_conversion
from marlinq.operations.convert.to_dense import DENSE, convert_bitmasks, convert_to_dense

if TYPE_CHECKING:
    import torch
else:
    from marlinq.core.lazy import torch

_COMMIT_BYTES = 1 << 30
_WORKERS = 4


@shows_progress
def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    target_format: str,
    source_format: str | None = None,
    scheme: str | None = None,
    allow_loss: bool = False,
    revision: str | None = None,
    strict_marlin: bool = False,
    skip_unsupported: bool = False,
    max_shard_size: int = DEFAULT_MAX_SHARD_BYTES,
    progress: Progress = True,
) -> ConversionReport:
    """Convert a quantised checkpoint to another format or scheme, without loss unless loss is allowed.

    All values that decide whether the conversion is exact are checked before the output folder is made. Then
    modules are read, converted and written in batches of about 1 GB. An interrupted run continues when the
    same call is repeated.

    Args:
        source: a checkpoint folder or Hub id.
        out: folder to make; it must not exist, unless it holds an interrupted run of this conversion.
        target_format: name in :data:`marlinq.formats.FORMATS`, or ``dense`` for dequantised weights.
        source_format: format that ``source`` must have; None takes whatever format is detected.
        scheme: name in :data:`marlinq.core.schemes.SCHEMES` that every module gets; None keeps each module's
            scheme.
        allow_loss: round values that the target can't hold exactly; the report says how much is lost.
        revision: branch, tag or commit of a Hub id; the main branch when None.
        strict_marlin: refuse modules that the original Marlin kernel does not take (it needs K divisible by
            128, N divisible by 256, and groups of 128 or one group per output channel).
        skip_unsupported: store modules dequantised where the target can't hold their shape, instead of
            refusing the conversion.
        max_shard_size: bytes of the largest shard.
        progress: True shows progress on stderr, False shows none; a function is called with (activity, steps
            done, steps in all).

    Raises:
        ConversionRefused: the target can't hold a module without loss; nothing was written.
        CheckpointError, UnsupportedError: the source is damaged, contradictory or of an unknown kind.
        UsageError: the formats named don't fit the source or each other.
        OutputError: ``out`` exists or can't be written.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    if target_format == DENSE and scheme is not None:
        raise UsageError(f"--scheme {scheme}: {DENSE} weights are not quantised; leave it out")
    if target_format != DENSE:
        _check_formats(source_format, target_format)
    targets = [name for name, each in FORMATS.items() if each.original_kernel]
    if strict_marlin and target_format not in targets:
        raise UsageError(f"convert: --strict-marlin: expected {' or '.join(targets)}, found {target_format}")
    opened = with_dense_weights(Checkpoint.open(source, revision=revision, progress=progress))
    if isinstance(opened, DerivedCheckpoint):
        if target_format != DENSE:
            raise UnsupportedError(
                f"{opened.path}: holds 16-bit weights as {BITMASK_FORMAT}; use marlinq quantize, or convert "
                f"--to {DENSE}"
            )
        check_place(Path(out), resume=True, source=opened.path)
        return convert_bitmasks(opened, Path(out), max_shard_size=max_shard_size, progress=progress)
    quantized = _quantized(opened, source_format, target_format, scheme)
    if target_format == DENSE:
        check_place(Path(out), resume=True, source=opened.path)
        return convert_to_dense(
            quantized, Path(out), allow_loss=allow_loss, max_shard_size=max_shard_size, progress=progress
        )
    with _one_torch_thread():
        return _convert(
            quantized,
            Path(out),
            FORMATS[target_format],
            scheme=None if scheme is None else SCHEMES[scheme],
            allow_loss=allow_loss,
            strict_marlin=strict_marlin,
            skip_unsupported=skip_unsupported,
            max_shard_size=max_shard_size,
            progress=progress,
        )


def _convert(
    quantized: QuantizedCheckpoint,
    out: Path,
    target: Format,
    *,
    scheme: NamedScheme | None,
    allow_loss: bool,
    strict_marlin: bool,
    skip_unsupported: bool,
    max_shard_size: int,
    progress: ReportProgress,
) -> ConversionReport:
    started = time.monotonic()
    checkpoint = quantized.checkpoint
    check_place(out, resume=True, source=checkpoint.path)
    plan = plan_conversion(
        quantized,
        target,
        scheme=scheme,
        allow_loss=allow_loss,
        strict_marlin=strict_marlin,
        skip_unsupported=skip_unsupported,
        progress=progress,
    )
    manifest = _manifest(plan, strict_marlin, skip_unsupported)
    fingerprint = fingerprint_of(checkpoint, max_shard_size, manifest)
    writer_class = StackingWriter if target.stacked else CheckpointWriter
    with writer_class(
        out, plan.tensors, fingerprint=fingerprint, max_shard_bytes=max_shard_size, resume=True
    ) as writer:
        resumed = len(writer.written)
        _write(plan, writer, min(_COMMIT_BYTES, 2 * max_shard_size), progress)
        checkpoint.check_unchanged()
        writer.finish(
            config=replace_quantization_config(plan.config, plan.quantization_config),
            manifest=manifest,
            side_files_from=checkpoint,
            extra_json=DIALECTS[target.dialect].extra_files(plan.quantization_config),
        )
    return ConversionReport(
        source=str(checkpoint.path),
        out=str(out),
        source_format=quantized.format.name,
        target_format=target.name,
        converted=len(plan.modules),
        skipped=plan.skipped,
        carried=len(quantized.passthrough),
        side_files=tuple(checkpoint.side_files),
        left_out=tuple(checkpoint.left_out),
        lossy=plan.lossy,
        notes=plan.notes,
        resumed=resumed,
        source_bytes=checkpoint.nbytes,
        out_bytes=sum(tensor.nbytes for tensor in plan.tensors),
        seconds=time.monotonic() - started,
    )


def _check_formats(source_format: str | None, target_format: str) -> None:
    for name in (source_format, target_format):
        if name is not None and name not in FORMATS:
            raise UsageError(f"convert: unknown format {name!r}; expected one of {', '.join(FORMATS)}")
    if (reason := FORMATS[target_format].read_only) is not None:
        raise UsageError(f"convert: {target_format} is read and never written: {reason}")


def _quantized(
    checkpoint: Checkpoint, source_format: str | None, target_format: str, scheme: str | None
) -> QuantizedCheckpoint:
    quantized = QuantizedCheckpoint.of(checkpoint)
    if quantized is None:
        raise UnsupportedError(f"{checkpoint.path}: is not quantised; use marlinq quantize")
    found = quantized.format.name
    if source_format not in (None, found):
        raise UsageError(f"{checkpoint.path}: expected a {source_format} checkpoint, found {found}")
    if found == target_format and scheme is None:
        raise UsageError(f"{checkpoint.path}: is in the {found} layout already; copy the folder instead")
    return quantized


def _manifest(plan: ConversionPlan, strict_marlin: bool, skip_unsupported: bool) -> dict[str, Any]:
    checkpoint = plan.source.checkpoint
    before = None
    if (checkpoint.path / MANIFEST).exists():
        before = read_json(checkpoint.path, MANIFEST)
        # The source's tensor hashes and fingerprint say nothing about the output's files.
        before = {key: value for key, value in before.items() if key not in ("tensors", "fingerprint")}
    return manifest_of(
        "convert",
        source_format=plan.source.format.name,
        format=plan.target.name,
        strict_marlin=strict_marlin,
        skip_unsupported=skip_unsupported,
        allow_loss=plan.allow_loss,
        skipped={name: keep.reason for name, keep in plan.skipped.items()},
        scale_dtypes=sorted({spec.scheme.scale_dtype for spec in plan.modules.values()}),
        source_quantization_config=dict(plan.source.config.raw),
        source=before,
    )


@dataclass(frozen=True)
class _Job:
    """A thread's unit of work: one module to convert, or one tensor to copy unchanged.

    Attributes:
        name: module or tensor.
        module: whether ``name`` is a module.
        nbytes: bytes in memory while the job runs, input and output together.
    """

    name: str
    module: bool
    nbytes: int


def _write(plan: ConversionPlan, writer: CheckpointWriter, max_bytes: int, progress: ReportProgress) -> None:
    done, modules = 0, len(plan.source.modules)
    with ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1)) as pool:
        for batch in _batches(_jobs(plan, writer.written), max_bytes):
            for job in pool.map(lambda job: _run(plan, writer, job), batch):
                done += job.module
                progress("converting", done, modules)
            writer.commit()
    progress("converting", modules, modules)


def _jobs(plan: ConversionPlan, written: set[str]) -> Iterator[_Job]:
    """Jobs that are not written yet, in the source's tensor order, so that each shard is read once."""
    source, carried = plan.source, set(plan.source.passthrough)
    for name, info in source.checkpoint.tensors.items():
        module = name.rpartition(".")[0]
        if name in carried:
            if name not in written:
                yield _Job(name, False, info.nbytes)
        elif name == source.codes_name(module) and not written.issuperset(_output_names(plan, module)):
            spec = source.modules[module]
            kept = module in plan.modules
            size = (
                info.nbytes if kept else spec.in_features * spec.out_features * ITEM_BYTES[plan.weight_dtype]
            )
            yield _Job(module, True, info.nbytes + size)


def _batches(jobs: Iterable[_Job], max_bytes: int) -> Iterator[list[_Job]]:
    """Consecutive jobs that together need at most ``max_bytes`` of memory; a larger job is a batch alone."""
    batch: list[_Job] = []
    total = 0
    for job in jobs:
        if batch and total + job.nbytes > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append(job)
        total += job.nbytes
    if batch:
        yield batch


def _output_names(plan: ConversionPlan, module: str) -> list[str]:
    spec = plan.modules.get(module)
    return (
        [f"{module}.{suffix}" for suffix in plan.layout_of(module).expected(spec)]
        if spec
        else [f"{module}.weight"]
    )


def _run(plan: ConversionPlan, writer: CheckpointWriter, job: _Job) -> _Job:
    source = plan.source
    if not job.module:
        writer.write(job.name, source.checkpoint.tensor(job.name))
        return job
    spec = plan.modules.get(job.name)
    if spec is None:
        weight = source.load(job.name).dequantize(torch_dtype(plan.weight_dtype))
        writer.write(f"{job.name}.weight", weight.t() if plan.transposed else weight)
        return job
    layout, target = source.layouts[job.name], plan.layout_of(job.name)
    way = plan.recasts.get(job.name)
    # Whole weights are loaded where codes may be NaN, which only loading refuses.
    may_be_nan = bool(nan_codes(spec.scheme.element))
    if way is not None or may_be_nan or layout.mask_key is not None or target.mask_key is not None:
        read = source.load(job.name)
        changed = read if way is None else way.apply(read, allow_loss=plan.allow_loss)
        assert changed is not None, "plan_conversion raises for modules that can't be recast"
        changed = replace(changed, sparsity=spec.scheme.sparsity)
        for suffix, tensor in target.pack(changed, spec.scheme).items():
            writer.write(f"{job.name}.{suffix}", tensor)
        return job
    grid = source.load_grid(job.name)
    for suffix, tensor in target.pack_grid(grid, spec.scheme).items():
        writer.write(f"{job.name}.{suffix}", tensor)
    codes = transcode(source.codes(job.name), spec, layout, target)
    writer.write(f"{job.name}.{target.key}", codes)
    return job


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Runs torch with one thread, because the pool's threads already convert a module each: more threads
    inside a module would only compete for the same cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
