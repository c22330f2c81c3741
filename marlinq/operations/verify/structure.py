"""Checks that a folder holds the tensors that its config describes, by names, shapes and dtypes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import safe_open

from marlinq.checkpoint import (
    Checkpoint,
    QuantizedCheckpoint,
    damaged_draft,
    dtype_contradiction,
    model_dtype,
    own_head,
    parse_quantization_config,
    says_tied,
    without_quantization_config,
)
from marlinq.checkpoint.quantization_config import read_separate_config
from marlinq.checkpoint.reader import QUANTIZE_CONFIGS
from marlinq.core import boundaries
from marlinq.core.display import counted
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import CheckpointError, MarlinqError
from marlinq.core.granularity import Granularity
from marlinq.core.progress import ReportProgress
from marlinq.formats import ModuleSpec, TensorSpec
from marlinq.formats.dialects import is_head
from marlinq.models import Blueprint, TensorNames, build_blueprint, converted, without_false_ties
from marlinq.models.left_out import left_out, unread_names
from marlinq.operations.verify.verification_report import Check, Findings
from marlinq.runtime.loading import (
    contradictions,
    match_tensors,
    read_generation_config,
    read_tokenizer,
    stored_otherwise,
)

_BLOCK = re.compile(r"\.(\d+)\.")


def model_blueprint(checkpoint: Checkpoint, trust_remote_code: bool) -> Blueprint | str:
    """The model that config.json describes, or why it can't be built."""
    try:
        blueprint = build_blueprint(
            without_quantization_config(checkpoint.config),
            source=str(checkpoint.path),
            tensors=checkpoint.tensors,
            trust_remote_code=trust_remote_code,
        )
        return without_false_ties(blueprint, checkpoint)
    except MarlinqError as error:
        return str(error)


def check_config(view: QuantizedCheckpoint) -> Check:
    """config.json's quantization_config against the other files that loaders read."""
    findings = Findings("config")
    path = view.checkpoint.path
    seen = []
    for name in QUANTIZE_CONFIGS:
        if not (path / name).exists():
            continue
        seen.append(name)
        try:
            raw = read_separate_config(path, name)
            other = parse_quantization_config(raw, str(path / name))
        except MarlinqError as error:
            findings.failures.append(str(error))
            continue
        if raw is None:
            continue
        for key in sorted(set(raw) & set(view.config.raw)):
            if raw[key] != view.config.raw[key]:
                findings.failures.append(
                    f"{name}: {key} is {_short(raw[key])}, config.json says {_short(view.config.raw[key])}"
                )
        if other is None or findings.failures:
            continue
        for module in view.modules:
            said, here = other.rules.scheme(module), view.config.rules.scheme(module)
            if other.format != view.config.format or said != here:
                findings.failures.append(f"{name}: describes {module} otherwise than config.json does")
    config = view.checkpoint.config
    own = own_head(view.checkpoint, view.modules) if says_tied(config) else None
    if own is not None:
        findings.warnings.append(
            f"{own}, but config.json says tie_word_embeddings: true; loaders that trust it multiply by the "
            "embedding instead"
        )
    if (contradiction := dtype_contradiction(view.checkpoint)) is not None:
        findings.warnings.append(contradiction)
    beside = f", {' and '.join(seen)} in step" if seen else ""
    return findings.result(f"{view.format.name}, {len(view.modules)} quantised modules{beside}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def check_tensors(view: QuantizedCheckpoint, blueprint: Blueprint | str) -> Check:
    """Checks name, shape and dtype of every tensor of the model, and that the folder holds no others."""
    findings = Findings("tensors")
    tensors = view.checkpoint.tensors
    for module, spec in view.modules.items():
        layout = view.layouts[module]
        reason = layout.shape_refusal(spec)
        if reason is not None:
            findings.failures.append(f"{module}: {reason}")
            continue
        names = view.tensor_names(module)
        for suffix, want in layout.expected(spec).items():
            if suffix not in names:
                findings.failures.append(f"{module}.{suffix}: missing")
            elif not TensorSpec((info := tensors[names[suffix]]).dtype, info.shape).holds(want):
                findings.failures.append(
                    f"{names[suffix]}: expected {_kind(want.dtype, want.shape)}, "
                    f"found {_kind(info.dtype, info.shape)}"
                )
        for suffix in sorted(set(names) - set(layout.expected(spec))):
            findings.failures.append(
                f"{names[suffix]}: a {layout.name} module of this kind has no such tensor"
            )
        wanted = layout.scale_dtype
        if wanted is not None and spec.scheme.scale_dtype != wanted:
            findings.warnings.append(
                f"{module}: scales are {spec.scheme.scale_dtype}; loaders of {layout.name} cast them "
                f"to {wanted}"
            )
    if (damaged := damaged_draft(view.checkpoint, view.passthrough)) is not None:
        findings.warnings.append(damaged)
    if isinstance(blueprint, str):
        findings.warnings.append("parameters can't be compared with the model's own, which can't be built")
        return findings.result("")
    _check_parameters(view, blueprint, findings)
    _check_one_scheme(view, blueprint, findings)
    return findings.result(f"{counted(len(tensors), 'tensors')}, all that the model needs and no others")


def _check_parameters(view: QuantizedCheckpoint, blueprint: Blueprint, findings: Findings) -> None:
    try:
        tensors = _in_memory(view, blueprint).tensors
    except CheckpointError as error:
        findings.failures.append(str(error))
        return
    names = TensorNames(blueprint, tensors.keys(), source=str(view.checkpoint.path))
    claimed: set[str] = set()
    for parameter, shape in blueprint.parameters.items():
        if parameter in blueprint.fused and names.own(parameter) is None:
            claimed |= _check_experts(view, blueprint, names, parameter, findings)
            continue
        stem, _, last = parameter.rpartition(".")
        module = names.quantized(stem, view) if last == "weight" else None
        if module is not None:
            claimed.update(view.tensor_names(module).values())
            _check_shape(view, blueprint, stem, module, findings)
            continue
        stored = names.find(parameter)
        if stored is None:
            findings.failures.append(f"{parameter}: missing, quantised or not")
            continue
        claimed.add(stored)
        info = tensors[stored]
        if info.shape != shape or "float" not in info.dtype:
            findings.failures.append(
                f"{stored}: expected floats {list(shape)}, found {_kind(info.dtype, info.shape)}"
            )
    others = [*blueprint.tied, *blueprint.buffers, *blueprint.computed]
    for name in others:
        stem, _, last = name.rpartition(".")
        if (stored := names.own(name)) is not None:
            claimed.add(stored)
        if last == "weight" and (module := names.quantized(stem, view)) is not None:
            claimed.update(view.tensor_names(module).values())
    owned = {name for module in view.modules for name in view.tensor_names(module).values()}
    left = left_out(blueprint, tensors)
    for name in tensors:
        if name not in claimed and not left(name):
            kind = "linear" if name in owned else "parameter"
            findings.failures.append(f"{name}: belongs to no {kind} of the model")


def _in_memory(view: QuantizedCheckpoint, blueprint: Blueprint) -> Checkpoint:
    """The checkpoint with its tensors named and shaped as the model has them in memory.

    Raises:
        CheckpointError: stored tensors do not fit transformers' conversion rule for this model.
    """
    return converted(view.checkpoint, stored_otherwise(blueprint, view.checkpoint, view))


def _check_one_scheme(view: QuantizedCheckpoint, blueprint: Blueprint, findings: Findings) -> None:
    """Checks that all experts of a layer have one scheme, as loaders assume."""
    names = TensorNames(blueprint, view.checkpoint.tensors.keys(), source=str(view.checkpoint.path))
    for experts in (each for block in blueprint.blocks for each in block.experts):
        stems = [names.quantized(projection.name, view) for projection in experts.projections]
        specs = {stem: view.modules[stem] for stem in stems if stem is not None}
        first = next(iter(specs), "")
        shared: set[Granularity] = set()
        for stem, spec in specs.items():
            same = (spec.scheme.element, spec.scheme.zero_point) == (
                specs[first].scheme.element,
                specs[first].scheme.zero_point,
            )
            shared = shared & _granularities(spec) if stem != first else _granularities(spec)
            if not same or not shared:
                findings.failures.append(
                    f"{stem}: {spec.scheme.describe()}, {first} is {specs[first].scheme.describe()}; "
                    "loaders have one scheme for all experts of a layer"
                )
                break


def _granularities(spec: ModuleSpec) -> set[Granularity]:
    """Granularities that describe a module: with one scale per channel, also a group of all channels."""
    single = spec.granularity == Granularity.channel()
    return {spec.granularity, *([Granularity.group(spec.in_features)] if single else [])}


def _check_experts(
    view: QuantizedCheckpoint, blueprint: Blueprint, names: TensorNames, parameter: str, findings: Findings
) -> set[str]:
    """Checks the matrices of fused experts, each stored as a module; returns the names of their tensors."""
    tensors = view.checkpoint.tensors
    claimed: set[str] = set()
    for projection in blueprint.fused[parameter]:
        for suffix in ("weight", "bias"):
            claimed.update({names.own(f"{projection.name}.{suffix}") or ""} - {""})
        quantized = names.quantized(projection.name, view)
        if quantized is not None:
            claimed.update(view.tensor_names(quantized).values())
            _check_shape(view, blueprint, projection.name, quantized, findings)
            continue
        stored = names.own(f"{projection.name}.weight")
        if stored is None:
            findings.failures.append(f"{projection.name}: missing, quantised or not")
            continue
        shape = (projection.out_features, projection.in_features)
        info = tensors[stored]
        if info.shape != shape or "float" not in info.dtype:
            findings.failures.append(
                f"{stored}: expected floats {list(shape)}, found {_kind(info.dtype, info.shape)}"
            )
    return claimed


def _check_shape(
    view: QuantizedCheckpoint, blueprint: Blueprint, own: str, module: str, findings: Findings
) -> None:
    projection = blueprint.by_name.get(own)
    if projection is None:
        findings.failures.append(f"{module}: quantised, but it is no linear layer")
        return
    spec = view.modules[module]
    k, n = projection.in_features, projection.out_features
    if (spec.in_features, spec.out_features) != (k, n):
        findings.failures.append(
            f"{module}: expected K={k} and N={n} from config.json, "
            f"found K={spec.in_features} and N={spec.out_features}"
        )


def check_loads(view: QuantizedCheckpoint, blueprint: Blueprint | str, trust_remote_code: bool) -> Check:
    """Runs the checks that ``load`` makes before it reads weights, with the same code."""
    findings = Findings("loads")
    if isinstance(blueprint, str):
        findings.failures.append(blueprint)

    def contradicted() -> None:
        generation_config = read_generation_config(view.checkpoint)
        if not isinstance(blueprint, str):
            findings.warnings.extend(
                contradictions(blueprint, _in_memory(view, blueprint), generation_config)
            )

    attempts: list[Callable[[], object]] = [
        contradicted,
        lambda: read_tokenizer(view.checkpoint, trust_remote_code),
    ]
    if not isinstance(blueprint, str):
        attempts.insert(0, lambda: match_tensors(blueprint, view.checkpoint, view))
    for attempt in attempts:
        try:
            attempt()
        except MarlinqError as error:
            findings.failures.append(str(error))
    return findings.result("the model, its generation config and its tokenizer are those of transformers")


def check_safetensors(checkpoint: Checkpoint) -> Check:
    """Checks that the safetensors library opens every shard."""
    findings = Findings("safetensors")
    for shard in checkpoint.shards:
        path = checkpoint.path / shard
        try:
            with (
                boundaries.foreign(str(path), "the safetensors library refuses it", "write it again"),
                safe_open(path, framework="pt") as file,
            ):
                names = set(file.keys())
        except MarlinqError as error:
            findings.failures.append(str(error))
            continue
        if names != {name for name, info in checkpoint.tensors.items() if info.shard == shard}:
            findings.failures.append(f"{path}: the safetensors library reads other tensors from it")
    return findings.result("opens in the safetensors library too")


def check_finite(
    view: QuantizedCheckpoint, blueprint: Blueprint | str, report_progress: ReportProgress
) -> Check:
    """Checks that norms, embeddings and biases are finite; the check of values covers scales, and tensors
    that the model does not read may hold anything."""
    findings = Findings("finite")
    named = model_dtype(view.checkpoint.config) or "float32"
    dtype = torch_dtype(named)
    names = [name for name in view.passthrough if "float" in view.checkpoint.tensors[name].dtype]
    if not isinstance(blueprint, str):
        unread = unread_names(blueprint)
        names = [name for name in names if not unread(name)]
    for done, name in enumerate(names):
        report_progress("looking for NaN and infinity", done, len(names))
        tensor = view.checkpoint.tensor(name)
        # isfinite does not support every 8-bit dtype.
        bad = int((~torch.isfinite(tensor if tensor.dtype.itemsize > 1 else tensor.float())).sum())
        if bad:
            findings.failures.append(f"{name}: {bad} of {tensor.numel()} values are NaN or infinite")
        elif tensor.dtype != dtype and bool((~torch.isfinite(tensor.to(dtype))).any()):
            findings.failures.append(f"{name}: overflows {named}, the dtype that config.json names")
    return findings.result(f"{len(names)} unquantised tensors hold no NaN and no infinity")


def check_coverage(view: QuantizedCheckpoint, blueprint: Blueprint | str) -> Check:
    """Checks that every linear in a decoder block is quantised, or that the config calls it unquantised."""
    findings = Findings("coverage")
    plain = _plain_linears(view, blueprint)
    excluded = 0
    for module, evidence in plain.items():
        if view.config.rules.scheme(module) is None or _left_out_of_blocks(view.config.raw, module):
            excluded += 1
        else:
            findings.failures.append(
                f"{module}: a plain weight, but quantization_config does not exclude it; {evidence}"
            )
    kept = f"; {excluded} left unquantised, as the config says" if excluded else ""
    heads = sum(is_head(module) for module in view.modules)
    head = ", and so is the output head" if heads else ""
    text = f"all {len(view.modules) - heads} linears of the blocks are quantised{head}{kept}"
    return findings.result(text)


def _plain_linears(view: QuantizedCheckpoint, blueprint: Blueprint | str) -> dict[str, str]:
    """Unquantised linear of a decoder block -> why it is expected to be quantised."""
    linears: dict[str, str] = {}
    if not isinstance(blueprint, str):
        tensors = _in_memory(view, blueprint).tensors
        names = TensorNames(blueprint, tensors.keys(), source=str(view.checkpoint.path))
        for projection in blueprint.projections():
            stored = names.own(f"{projection.name}.weight")
            if stored is None and not projection.whole and names.own(projection.parameter) is not None:
                stored = f"{names.module(projection)}.weight"
            if stored is not None and stored.removesuffix(".weight") not in view.modules:
                linears[stored.removesuffix(".weight")] = "it is a linear layer inside a decoder block"
        return linears
    siblings: dict[str, int] = {}
    for module in view.modules:
        pattern = _BLOCK.sub(".*.", module)
        siblings[pattern] = siblings.get(pattern, 0) + 1
    for name in view.passthrough:
        module, _, suffix = name.rpartition(".")
        count = siblings.get(_BLOCK.sub(".*.", module), 0)
        if suffix == "weight" and count:
            linears[module] = f"the same module is quantised in {count} other block{'s' * (count > 1)}"
    return linears


def _left_out_of_blocks(raw: Mapping[str, Any], module: str) -> bool:
    """Whether GPTQ's ``modules_in_block_to_quantize``, which names quantised linears, omits ``module``."""
    listed = raw.get("modules_in_block_to_quantize")
    if not isinstance(listed, list) or not listed:
        return False
    names = [name for part in listed for name in (part if isinstance(part, list) else [part])]
    return _BLOCK.split(module, maxsplit=1)[-1] not in names


def _kind(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"
