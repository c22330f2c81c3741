"""Reads a report's figures from a checkpoint's tensors, its manifest and an older report in its folder.

All of them are untrusted. Values of the manifest are used only if they have the right type and are about
modules of the checkpoint. Of large tensors, evenly spaced pieces are read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marlinq.checkpoint import MANIFEST, Checkpoint, QuantizedCheckpoint, TensorInfo
from marlinq.checkpoint.header import tensor_bytes
from marlinq.checkpoint.reader import read_json
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.float_elements import E4M3
from marlinq.core.progress import ReportProgress
from marlinq.core.safe_text import one_line
from marlinq.formats.dialects import is_head
from marlinq.methods.quantity import ErrorQuantity
from marlinq.operations.report.evaluation import read_evaluation
from marlinq.operations.report.figures import (
    BINS_PER_OCTAVE,
    OCTAVES,
    CheckpointFigures,
    ModuleFigures,
    ScaleFigures,
    TimeFigures,
    place,
)

REPORT_JSON = "report.json"

_SAMPLE_BYTES = 256 << 20
"""bytes of codes that are read: figures are then exact to a few per mille, and read in seconds"""
_LEAST_SAMPLE, _LARGEST_SAMPLE = 16 << 10, 1 << 20
_PIECES = 16
_THREADS = min(8, os.cpu_count() or 1)
"""threads that read and count; numpy releases the interpreter's lock"""
_LONGEST_VALUE = 400
_MOST_ENTRIES = 64
_LARGEST = 1e30
"""largest accepted error, count or time"""


def read_figures(checkpoint: Checkpoint, name: str, progress: ReportProgress) -> CheckpointFigures:
    """The figures of an open checkpoint.

    Args:
        checkpoint: quantised checkpoint.
        name: name in the report.
        progress: called for every module.

    Raises:
        CheckpointError: config and tensors contradict each other, or a file ends early.
        UnsupportedError: it is not quantised, or in a way that marlinq does not read.
    """
    quantized = QuantizedCheckpoint.of(checkpoint)
    if quantized is None:
        raise UnsupportedError(f"{checkpoint.path}: is not quantised; pass the output of marlinq quantize")
    checkpoint = quantized.checkpoint
    manifest, notes = _manifest(checkpoint)
    run = _mapping(manifest.get("run"))
    method = _mapping(manifest.get("recipe")).get("method")
    sample = max(_LEAST_SAMPLE, min(_LARGEST_SAMPLE, _SAMPLE_BYTES // len(quantized.modules)))
    modules = []
    with ThreadPoolExecutor(_THREADS) as threads:
        counted_modules = threads.map(
            lambda module: _module(quantized, module, _mapping(run.get(f"module {module}")), method, sample),
            quantized.modules,
        )
        for done in range(len(quantized.modules)):
            progress("counting codes and scales", done, len(quantized.modules))
            modules.append(next(counted_modules))
    progress("counting codes and scales", len(modules), len(modules))
    fingerprint = manifest.get("fingerprint")
    fingerprint = fingerprint if isinstance(fingerprint, str) else ""
    kept = _texts(manifest.get("kept"), most=len(checkpoint.tensors))
    kept = {module: kept.get(module, "") for module in quantized.unquantized_linears()} | kept
    counted = sum(sum(module.codes) for module in modules)
    weights = sum(module.in_features * module.out_features for module in modules)
    others = [checkpoint.tensors[tensor] for tensor in quantized.passthrough]
    return CheckpointFigures(
        name=name,
        format=quantized.format.name,
        architecture=_architecture(checkpoint.config),
        fingerprint=fingerprint,
        modules=tuple(modules),
        sizes=_sizes(quantized),
        wide_bytes=2 * weights + sum(info.nbytes for info in others),
        parameters=weights + sum(math.prod(info.shape) for info in others),
        recipe=_texts(manifest.get("recipe")),
        environment=_texts(manifest.get("environment")),
        calibration=_texts(run.get("calibration")),
        kept=kept,
        time=_time(checkpoint, fingerprint),
        evaluation=read_evaluation(checkpoint.path, fingerprint),
        sampled=counted / weights,
        notes=tuple(notes),
    )


def _manifest(checkpoint: Checkpoint) -> tuple[Mapping[str, Any], list[str]]:
    if not (checkpoint.path / MANIFEST).exists():
        return {}, [f"No {MANIFEST}: errors, tokens and the recipe are unknown."]
    try:
        manifest = read_json(checkpoint.path, MANIFEST)
    except CheckpointError as error:
        return {}, [f"{MANIFEST} can't be read ({error}): errors, tokens and the recipe are unknown."]
    if manifest.get("operation") != "quantize":
        told = f"{MANIFEST} is not that of a quantise run"
        return manifest, [f"{told}: errors and tokens stay with the folder that quantize wrote."]
    return manifest, []


def _module(
    quantized: QuantizedCheckpoint, name: str, noted: Mapping[str, Any], method: Any, sample: int
) -> ModuleFigures:
    spec, layout = quantized.modules[name], quantized.layouts[name]
    mismatch = quantized.mismatch(name)
    if mismatch is not None:
        raise CheckpointError(f"{quantized.checkpoint.path}: {name}.{mismatch}")
    tensors = quantized.checkpoint.tensors
    names = quantized.tensor_names(name)
    block, projection = place(name)
    fallback, reason = noted.get("fallback"), noted.get("reason")
    return ModuleFigures(
        name=name,
        block=block,
        projection=projection,
        in_features=spec.in_features,
        out_features=spec.out_features,
        bits=spec.scheme.element.bits,
        scheme=spec.scheme.describe(),
        nbytes=sum(tensors[tensor].nbytes for tensor in names.values()),
        codes=_code_counts(
            quantized.checkpoint, tensors[names[layout.key]], spec.scheme.element.bits, sample
        ),
        scales=_scale_figures(
            quantized.checkpoint, tensors[names[layout.scale_key]], spec.scheme.scale_dtype, sample
        ),
        error=_number(noted.get("relative_error")),
        quantity=_quantity(noted, method),
        tokens=_count(noted.get("tokens")),
        fallback=_text(fallback) if isinstance(fallback, str) else None,
        reason=_text(reason) if isinstance(reason, str) else None,
    )


# Quantity of the errors by method, for older manifests without it.
_QUANTITIES = {
    "gptq": ErrorQuantity.OUTPUTS,
    "imatrix": ErrorQuantity.INPUTS,
    "rtn": ErrorQuantity.WEIGHTS,
}


def _quantity(noted: Mapping[str, Any], method: Any) -> ErrorQuantity | None:
    """Quantity of a module's error, from its note or else the recipe's method; None where both are silent."""
    named = noted.get("quantity")
    if named is None and isinstance(method, str) and not noted.get("fallback"):
        return _QUANTITIES.get(method)
    return next((quantity for quantity in ErrorQuantity if quantity == named), None)


def _pieces(checkpoint: Checkpoint, info: TensorInfo, sample: int) -> bytearray:
    """All bytes of a tensor, or ``sample`` of them in pieces spread evenly over it."""
    file = checkpoint.files[info.shard]
    computed = tensor_bytes(checkpoint.tensor(info.name)) if checkpoint.computes(info.name) else None
    if info.nbytes <= sample:
        starts, size = [0], info.nbytes
    else:
        # Words of 8 bytes stay whole, and so do the values in them.
        size = sample // _PIECES & ~7
        last = info.nbytes - size
        starts = [(last * piece // (_PIECES - 1)) & ~7 for piece in range(_PIECES)]
    data = bytearray(size * len(starts))
    for number, start in enumerate(starts):
        part = memoryview(data)[number * size : (number + 1) * size]
        if computed is not None:
            part[:] = computed[start : start + size]
        elif not file.read_into(part, info.offset + start):
            raise CheckpointError(f"{file.path}: tensor {info.name} ends early; the file was truncated")
    return data


def _code_counts(checkpoint: Checkpoint, info: TensorInfo, bits: int, sample: int) -> tuple[int, ...]:
    """How often each code occurs. Every layout packs codes densely, in an order that does not matter here."""
    counts = np.bincount(np.frombuffer(_pieces(checkpoint, info, sample), np.uint8), minlength=256)
    if bits == 4:
        pairs = counts.reshape(16, 16)
        counts = pairs.sum(axis=0) + pairs.sum(axis=1)
    return tuple(int(count) for count in counts)


def _scale_figures(checkpoint: Checkpoint, info: TensorInfo, dtype: str, sample: int) -> ScaleFigures:
    values = _floats(_pieces(checkpoint, info, sample), dtype)
    finite = values[np.isfinite(values)]
    sizes = np.sort(np.abs(finite))
    bins = np.zeros((OCTAVES[1] - OCTAVES[0]) * BINS_PER_OCTAVE, np.int64)
    if sizes.size:
        # A zero has no logarithm; it counts at the low end.
        exponents = np.log2(np.maximum(sizes, 2.0 ** (OCTAVES[0] - 1)))
        places = np.floor((exponents - OCTAVES[0]) * BINS_PER_OCTAVE).astype(np.int64)
        bins += np.bincount(places.clip(0, len(bins) - 1), minlength=len(bins))

    def quantile(share: float) -> float:
        return float(sizes[round(share * (sizes.size - 1))]) if sizes.size else 0.0

    return ScaleFigures(
        counted=values.size,
        smallest=quantile(0),
        low=quantile(0.05),
        middle=quantile(0.5),
        high=quantile(0.95),
        largest=quantile(1),
        negative=float((finite < 0).mean()) if finite.size else 0.0,
        bad=int(values.size - finite.size),
        bins=tuple(int(count) for count in bins),
    )


def _floats(data: bytearray, dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e4m3fn":
        return np.array(E4M3.table, np.float32)[np.frombuffer(data, np.uint8)]
    if dtype == "float8_e8m0fnu":
        # The exponent of a float32; 0xFF is NaN, 0 a subnormal number.
        exponents = np.frombuffer(data, np.uint8).astype(np.float32)
        return np.where(exponents == 0xFF, np.float32(np.nan), np.exp2(exponents - 127)).astype(np.float32)
    return np.frombuffer(data, dtype).astype(np.float32)


def _sizes(quantized: QuantizedCheckpoint) -> dict[str, int]:
    tensors = quantized.checkpoint.tensors
    sizes = dict.fromkeys(
        ("codes", "scales", "zero points and order", "embeddings", "output head", "others"), 0
    )
    for module, layout in quantized.layouts.items():
        for suffix, name in quantized.tensor_names(module).items():
            kind = {layout.key: "codes", layout.scale_key: "scales"}.get(suffix, "zero points and order")
            sizes[kind] += tensors[name].nbytes
    for name in quantized.passthrough:
        stem = name.rpartition(".")[0]
        last = stem.rpartition(".")[2]
        table = "embed" in last or last in ("wte", "wpe")
        kind = "output head" if is_head(stem) else "embeddings" if table else "others"
        sizes[kind] += tensors[name].nbytes
    return {kind: size for kind, size in sizes.items() if size}


def _time(checkpoint: Checkpoint, fingerprint: str) -> TimeFigures | None:
    """The time of the run as the folder's own report tells it, if that report is of this checkpoint."""
    if not fingerprint or not (checkpoint.path / REPORT_JSON).is_file():
        return None
    try:
        entries = read_json(checkpoint.path, REPORT_JSON).get("checkpoints")
    except CheckpointError:
        return None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("fingerprint") == fingerprint:
            return read_time(entry.get("time"))
    return None


def read_time(value: Any) -> TimeFigures | None:
    """The inverse of :func:`~marlinq.operations.report.figures.plain_time`; None for anything else."""
    values = _mapping(value)
    total, device, ranks = _number(values.get("total")), values.get("device"), _count(values.get("ranks", 1))
    stages, blocks = values.get("stages"), values.get("blocks")
    if total is None or not isinstance(device, str) or not isinstance(stages, list):
        return None
    pairs = []
    for stage in stages[:_MOST_ENTRIES]:
        seconds = _number(stage[1]) if isinstance(stage, list) and len(stage) == 2 else None
        if seconds is None:
            return None
        pairs.append((_text(stage[0]), seconds))
    seconds_of = [_number(block) for block in blocks] if isinstance(blocks, list) else []
    known = tuple(seconds for seconds in seconds_of if seconds is not None)
    return TimeFigures(tuple(pairs), known, total, _text(device), max(1, ranks or 1))


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return _text(named[0])
    return _text(config.get("model_type", "unknown"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    """A number from 0 to :data:`_LARGEST`, or None; what is below its inverse counts as 0.

    So sums, ratios and logarithms of figures are finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST:
        return None
    return float(value) if value > 1 / _LARGEST else 0.0


def _count(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None else None


def _text(value: Any) -> str:
    """A JSON value in one printable line of bounded length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    line = one_line(text)
    return line if len(line) <= _LONGEST_VALUE else line[: _LONGEST_VALUE - 3] + "..."


def _texts(value: Any, most: int = _MOST_ENTRIES) -> dict[str, str]:
    entries = list(_mapping(value).items())[:most]
    return {_text(key): _text(item) for key, item in entries}
