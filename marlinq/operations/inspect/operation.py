"""The inspect operation."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import TypeVar

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, floating_linears
from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.core.weight import Grid
from marlinq.formats import ModuleSpec
from marlinq.operations.inspect.eligibility import Candidate, eligibilities
from marlinq.operations.inspect.report import Inspection, ModuleFacts

_Value = TypeVar("_Value", bound=Hashable)


def inspect(checkpoint: str | os.PathLike[str], *, modules: bool = False) -> Inspection:
    """Say what a checkpoint holds. Reads headers, configs and the small tensors of each quantised linear.

    Args:
        checkpoint: a folder or Hub id, quantised or not.
        modules: list every quantised linear.

    Raises:
        CheckpointError: the folder is damaged or contradicts itself.
        UnsupportedError: its quantisation is of a kind that marlinq does not read.
    """
    opened = Checkpoint.open(checkpoint)
    quantized = QuantizedCheckpoint.of(opened)
    if quantized is None:
        return _unquantized(opened)
    facts: list[ModuleFacts] = []
    candidates: dict[str, Candidate] = {}
    for name, spec in quantized.modules.items():
        grid, problem = _grid(quantized, name)
        declared = quantized.config.rules.scheme(name)
        candidates[name] = Candidate(
            layout=quantized.layout.name,
            spec=spec,
            grid=grid,
            declared_group_size=spec.scheme.group_size if declared is None else declared.group_size,
            declared_act_order=declared is not None and declared.act_order,
            declared_symmetric=not quantized.layout.as_stored(declared or spec.scheme).stores_zeros,
        )
        facts.append(_facts(quantized, name, spec, grid, problem))
    stored = sum(module.nbytes for module in facts)
    weights = sum(module.in_features * module.out_features for module in facts)
    others = sum(math.prod(opened.tensors[name].shape) for name in quantized.passthrough)
    return Inspection(
        checkpoint=str(opened.path),
        format=quantized.layout.name,
        architecture=_architecture(opened),
        dtype=_main_dtype(opened, quantized.passthrough),
        bits=_by_frequency(module.bits for module in facts),
        group_sizes=_by_frequency(module.group_size for module in facts),
        symmetry=_symmetry(facts),
        g_idx=_order(quantized, facts),
        quantized_modules=len(facts),
        unquantized_modules=tuple(quantized.unquantized_linears()),
        shards=len(opened.shards),
        bytes_on_disk=_bytes_on_disk(opened),
        parameters=weights + others,
        quantized_parameters=weights,
        linear_bits=8 * stored / weights,
        model_bits=8 * opened.nbytes / (weights + others),
        kernels=eligibilities(candidates),
        notes=tuple(_notes(facts, candidates)),
        modules=tuple(facts) if modules else None,
    )


def _unquantized(opened: Checkpoint) -> Inspection:
    parameters = sum(math.prod(info.shape) for info in opened.tensors.values())
    if parameters == 0:
        raise CheckpointError(f"{opened.path}: holds no parameters")
    return Inspection(
        checkpoint=str(opened.path),
        format=None,
        architecture=_architecture(opened),
        dtype=_main_dtype(opened, opened.tensors),
        bits=(),
        group_sizes=(),
        symmetry=None,
        g_idx=None,
        quantized_modules=0,
        unquantized_modules=tuple(floating_linears(opened, opened.tensors)),
        shards=len(opened.shards),
        bytes_on_disk=_bytes_on_disk(opened),
        parameters=parameters,
        quantized_parameters=0,
        linear_bits=None,
        model_bits=8 * opened.nbytes / parameters,
        kernels=(),
        notes=(),
    )


def _grid(quantized: QuantizedCheckpoint, name: str) -> tuple[Grid | None, str | None]:
    try:
        return quantized.load_grid(name), None
    except ConversionRefused as refusal:
        # Undecodable zeros don't keep the rest of the checkpoint from being described.
        return None, str(refusal).removeprefix(f"{quantized.checkpoint.path}: {name}: ")


def _facts(
    quantized: QuantizedCheckpoint, name: str, spec: ModuleSpec, grid: Grid | None, problem: str | None
) -> ModuleFacts:
    tensors = quantized.checkpoint.tensors
    mismatch = quantized.mismatch(name)
    if mismatch is not None:
        raise CheckpointError(f"{quantized.checkpoint.path}: {name}.{mismatch}")
    nbytes = sum(tensors[tensor].nbytes for tensor in quantized.tensor_names(name).values())
    order = "unknown" if grid is None else "in order" if grid.has_trivial_g_idx else "activation order"
    return ModuleFacts(
        name=name,
        in_features=spec.in_features,
        out_features=spec.out_features,
        bits=spec.scheme.element.bits,
        group_size=spec.scheme.group_size,
        symmetric=None if grid is None else not grid.scheme.stores_zeros,
        g_idx=order,
        bias=f"{name}.bias" in tensors,
        scale_dtype=spec.scheme.scale_dtype,
        nbytes=nbytes,
        effective_bits=8 * nbytes / (spec.in_features * spec.out_features),
        problem=problem,
    )


def _symmetry(facts: list[ModuleFacts]) -> str:
    found = {module.symmetric for module in facts}
    if None in found:
        return "unknown"
    return "mixed" if len(found) > 1 else "symmetric" if True in found else "asymmetric"


def _order(quantized: QuantizedCheckpoint, facts: list[ModuleFacts]) -> str:
    extras = any(spec.extras for spec in quantized.modules.values())
    if not quantized.layout.stores_order and not extras:
        return "none"
    found = {module.g_idx for module in facts}
    return found.pop() if len(found) == 1 else "mixed"


def _notes(facts: list[ModuleFacts], candidates: dict[str, Candidate]) -> Iterable[str]:
    for module in facts:
        if module.problem is not None:
            yield f"{module.name}: {module.problem}"
    flagged = [module for module in facts if candidates[module.name].declared_act_order]
    if flagged and all(module.g_idx == "in order" for module in flagged):
        yield "the config says desc_act: true, but every g_idx is in order; converting it writes false"
    silent = [module for module in facts if module.g_idx == "activation order" and module not in flagged]
    if silent:
        yield (
            f"{silent[0].name}: the g_idx is in activation order, but the config says desc_act: false; "
            "loaders that trust the config compute wrong results"
        )
    wrong = [
        module for module in facts if candidates[module.name].declared_symmetric and module.symmetric is False
    ]
    if wrong:
        yield f"{wrong[0].name}: the config says symmetric, but the stored zero points differ"


def _by_frequency(values: Iterable[_Value]) -> tuple[_Value, ...]:
    return tuple(value for value, _ in Counter(values).most_common())


def _main_dtype(opened: Checkpoint, names: Iterable[str]) -> str:
    sizes: Counter[str] = Counter()
    for name in names:
        info = opened.tensors[name]
        sizes[info.dtype] += info.nbytes
    return sizes.most_common(1)[0][0] if sizes else "none"


def _bytes_on_disk(opened: Checkpoint) -> int:
    return sum((opened.path / shard).stat().st_size for shard in opened.shards)


def _architecture(opened: Checkpoint) -> str:
    named = opened.config.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0]
    return str(opened.config.get("model_type", "unknown"))
