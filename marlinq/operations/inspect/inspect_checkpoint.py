"""The inspect operation."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from marlinq.checkpoint import (
    Checkpoint,
    QuantizedCheckpoint,
    UndeclaredError,
    damaged_draft,
    find_draft_head,
    floating_linears,
    own_head,
    says_tied,
    with_dense_weights,
)
from marlinq.core.display import counted
from marlinq.core.errors import CheckpointError, UsageError
from marlinq.core.progress import Progress, shows_progress
from marlinq.core.scheme import Scheme
from marlinq.core.schemes import named_scheme
from marlinq.formats import ModuleSpec
from marlinq.formats.dialects import DIALECTS, is_head
from marlinq.operations.inspect.eligibility import (
    OWN,
    ServerVerdict,
    Whole,
    plain_verdict,
    refused_by_load,
    verdicts,
)
from marlinq.operations.inspect.inspection import Inspection, ModuleFacts
from marlinq.operations.inspect.load_refusal import build_refusal, doubtful_refusal, load_refusal
from marlinq.operations.inspect.parallel import LinearFacts, experts, unknown_axes
from marlinq.operations.inspect.servers import servers
from marlinq.operations.inspect.stored_values import StoredFacts, stored_facts

_Value = TypeVar("_Value", bound=Hashable)


@shows_progress
def inspect(
    checkpoint: str | os.PathLike[str],
    *,
    modules: bool = False,
    build: bool = False,
    tensor_parallel: int = 1,
    revision: str | None = None,
    progress: Progress = True,
) -> Inspection:
    """Describe a checkpoint from its headers, configs and the small tensors of each quantised linear.

    Args:
        checkpoint: folder or Hub id, quantised or not.
        modules: whether the result lists every quantised linear.
        build: whether the model is built without weights, so that marlinq's verdict is what ``load`` does. It
            takes seconds. Without it the model is built only where the name or shape of a tensor is in doubt.
        tensor_parallel: number of GPUs over which servers split each layer; it decides their shape rules.
        revision: branch, tag or commit of a Hub id; the main branch when None.
        progress: True shows progress on stderr, False shows none; a function is called with (activity, steps
            done, steps in all).

    Raises:
        CheckpointError: the folder is damaged or contradicts itself.
        UnsupportedError: marlinq does not read this kind of quantisation.
        UsageError: ``tensor_parallel`` is below 1.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    if tensor_parallel < 1:
        raise UsageError(f"tensor parallelism: expected 1 GPU or more, found {tensor_parallel}")
    opened = with_dense_weights(Checkpoint.open(checkpoint, revision=revision, progress=progress))
    try:
        quantized = QuantizedCheckpoint.of(opened)
    except UndeclaredError as refusal:
        undeclared = str(refusal).removeprefix(f"{opened.path}: ")
        return _unquantized(opened, undeclared, build=build, tensor_parallel=tensor_parallel)
    if quantized is None:
        return _unquantized(opened, None, build=build, tensor_parallel=tensor_parallel)
    opened = quantized.checkpoint
    facts: list[ModuleFacts] = []
    layers: dict[str, LinearFacts] = {}
    for name, spec in quantized.modules.items():
        mismatch = quantized.mismatch(name)
        if mismatch is not None:
            raise CheckpointError(f"{opened.path}: {name}.{mismatch}")
        stored = stored_facts(quantized, name)
        layers[name] = _layer(quantized, name, spec, stored)
        facts.append(_facts(quantized, name, spec, stored))
    stranger, unknown = _strangers(quantized)
    own = own_head(opened, quantized.modules) if says_tied(opened.config) else None
    unquantized = tuple(quantized.unquantized_linears())
    whole = replace(_whole(quantized, unquantized), no_linear=stranger)
    said = [text for text in (stranger, unknown) if text is not None]
    judged = verdicts(layers, whole, tensor_parallel=tensor_parallel)
    against = build_refusal(opened, quantized) if build and judged[0].server == OWN else None
    if against is not None:
        judged = (refused_by_load(against), *judged[1:])
    nbytes = sum(module.nbytes for module in facts)
    weights = sum(module.in_features * module.out_features for module in facts)
    others = sum(math.prod(opened.tensors[name].shape) for name in quantized.passthrough)
    return Inspection(
        checkpoint=str(opened.path),
        format=quantized.format.name,
        architecture=_architecture(opened),
        dtype=_main_dtype(opened, quantized.passthrough),
        bits=_by_frequency(module.bits for module in facts),
        group_sizes=_by_frequency(module.group_size for module in facts),
        symmetry=_symmetry(facts),
        g_idx=_order(quantized, facts),
        quantized_modules=len(facts),
        schemes=dict(Counter(_in_words(spec.scheme) for spec in quantized.modules.values()).most_common()),
        head=next((spec.scheme.describe() for n, spec in quantized.modules.items() if is_head(n)), None),
        unquantized_modules=unquantized,
        shards=len(opened.shards),
        bytes_on_disk=_bytes_on_disk(opened),
        parameters=weights + others,
        quantized_parameters=weights,
        linear_bits=8 * nbytes / weights,
        model_bits=8 * opened.nbytes / (weights + others),
        tensor_parallel=tensor_parallel,
        servers=judged,
        notes=(
            *said,
            *_notes(facts, layers, tensor_parallel, own_head=own),
            *_draft_notes(quantized, unquantized),
        ),
        undivided=_undivided(tensor_parallel),
        modules=tuple(facts) if modules else None,
    )


def _undivided(tensor_parallel: int) -> tuple[str, ...]:
    """Names of the servers that can't be judged on so many GPUs."""
    return (OWN, *(each.name for each in servers() if not each.parallel)) if tensor_parallel > 1 else ()


def _strangers(quantized: QuantizedCheckpoint) -> tuple[str | None, str | None]:
    """(a sentence about a tensor that is none of the model's, why that can't be decided); each is None where
    it does not apply."""
    linears = quantized.doubtful_linears()
    if not linears:
        return doubtful_refusal(quantized.checkpoint, quantized), None
    # Imports torch and transformers, which takes seconds and is avoided for other checkpoints.
    from marlinq.models import check_linears

    try:
        unknown = check_linears(quantized)
    except CheckpointError as refusal:
        return str(refusal).removeprefix(f"{quantized.checkpoint.path}: "), None
    return (None, unknown) if unknown else (load_refusal(quantized.checkpoint, quantized), None)


def planned_verdicts(planned: QuantizedCheckpoint, *, tensor_parallel: int = 1) -> tuple[ServerVerdict, ...]:
    """The verdicts on a checkpoint that is planned: config and headers are known, tensors don't exist yet.

    Zero points are assumed to be what the schemes say, and every g_idx to be in order.

    Args:
        planned: config and headers of the checkpoint.
        tensor_parallel: number of GPUs over which servers split each layer.
    """
    layers = {
        name: _layer(planned, name, spec, StoredFacts(not spec.scheme.stores_zeros, True, True))
        for name, spec in planned.modules.items()
    }
    return verdicts(
        layers, _whole(planned, tuple(planned.unquantized_linears())), tensor_parallel=tensor_parallel
    )


def _unquantized(
    opened: Checkpoint, undeclared: str | None, *, build: bool, tensor_parallel: int
) -> Inspection:
    """The facts of a checkpoint without a quantised view; ``undeclared`` says which tensors look quantised
    nevertheless. Only marlinq's own verdict is known, and only where the model is built or refused."""
    parameters = sum(math.prod(info.shape) for info in opened.tensors.values())
    if parameters == 0:
        raise CheckpointError(
            f"{opened.path}: its safetensors files hold no weights; copy the checkpoint again"
        )
    note = undeclared or doubtful_refusal(opened, None)
    refusal = note if note is not None or not build else build_refusal(opened, None)
    own = refused_by_load(refusal) if refusal is not None else plain_verdict()
    notes = [note, damaged_draft(opened, opened.tensors)]
    undivided = _undivided(tensor_parallel)
    judged = () if undivided or not (build or refusal) else (own,)
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
        schemes={},
        head=None,
        unquantized_modules=tuple(floating_linears(opened, opened.tensors)),
        shards=len(opened.shards),
        bytes_on_disk=_bytes_on_disk(opened),
        parameters=parameters,
        quantized_parameters=0,
        linear_bits=None,
        model_bits=8 * opened.nbytes / parameters,
        tensor_parallel=tensor_parallel,
        servers=judged,
        notes=tuple(note for note in notes if note is not None),
        undivided=undivided,
        unjudged=tuple(
            name
            for name in (OWN, *(each.name for each in servers()))
            if name not in (*undivided, *(each.server for each in judged))
        ),
        undeclared=undeclared is not None,
    )


def _layer(quantized: QuantizedCheckpoint, name: str, spec: ModuleSpec, stored: StoredFacts) -> LinearFacts:
    declared = quantized.config.rules.scheme(name) or spec.scheme
    return LinearFacts(
        layout=quantized.format.name,
        in_features=spec.in_features,
        out_features=spec.out_features,
        element=spec.scheme.element,
        granularity=spec.scheme.granularity,
        declared_symmetric=not quantized.layouts[name].as_stored(declared).stores_zeros,
        symmetric=stored.symmetric,
        declared_act_order=declared.act_order,
        in_order=stored.in_order is not False,
        sortable=stored.sortable,
        zero_writer=spec.zero_writer,
        problem=stored.problem,
        named=named_scheme(declared),
    )


def _whole(quantized: QuantizedCheckpoint, unquantized: tuple[str, ...]) -> Whole:
    config = quantized.checkpoint.config
    inner = config.get("text_config")
    keys = inner if isinstance(inner, dict) else config

    def count(key: str) -> int | None:
        value = keys.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    heads = count("num_attention_heads")
    dialect = DIALECTS[quantized.format.dialect]
    return Whole(
        layout=quantized.format.name,
        rules=_has_rules(quantized.config.raw),
        unquantized=unquantized,
        heads=heads,
        kv_heads=count("num_key_value_heads") or heads,
        architecture=_architecture(quantized.checkpoint),
        tied=says_tied(config),
        says_head=all(
            dialect.says_head(quantized.config, name) for name in quantized.modules if is_head(name)
        ),
        fused_rules=_fused_rules(quantized),
    )


def _fused_rules(quantized: QuantizedCheckpoint) -> dict[str, tuple[object, ...] | None]:
    """Settings that GPTQ's ``dynamic`` rules give the names that servers use for fused layers."""
    if not quantized.config.raw.get("dynamic"):
        return {}
    rules: dict[str, tuple[object, ...] | None] = {}
    for server in servers():
        for whole, members in server.fused.items():
            for name, spec in quantized.modules.items():
                parent, _, last = name.rpartition(".")
                if last == members[0]:
                    fused = f"{parent}.{whole}"
                    rules[fused] = _said(quantized, fused, spec)
    return rules


def _said(quantized: QuantizedCheckpoint, name: str, spec: ModuleSpec) -> tuple[object, ...] | None:
    """The module's :attr:`LinearFacts.scheme` by the config; None where it keeps it unquantised."""
    scheme = quantized.config.rules.scheme(name)
    if scheme is None:
        return None
    symmetric = not quantized.format.layout_of(scheme).as_stored(scheme).stores_zeros
    granularity = scheme.for_channels(spec.in_features).granularity
    return scheme.element, granularity, symmetric, scheme.act_order


def _has_rules(raw: Mapping[str, Any]) -> bool:
    """Whether a GPTQ config has rules that it does not also say in ``modules_in_block_to_quantize``."""
    dynamic = raw.get("dynamic")
    if not isinstance(dynamic, dict) or not dynamic:
        return False
    return "modules_in_block_to_quantize" not in raw or not all(rule.startswith("-:") for rule in dynamic)


def _facts(quantized: QuantizedCheckpoint, name: str, spec: ModuleSpec, stored: StoredFacts) -> ModuleFacts:
    tensors = quantized.checkpoint.tensors
    nbytes = sum(tensors[tensor].nbytes for tensor in quantized.tensor_names(name).values())
    orders = {True: "in order", False: "activation order", None: "unknown"}
    return ModuleFacts(
        name=name,
        in_features=spec.in_features,
        out_features=spec.out_features,
        bits=spec.scheme.element.bits,
        group_size=spec.scheme.granularity.size,
        symmetric=stored.symmetric,
        g_idx=orders[stored.in_order],
        bias=f"{name}.bias" in tensors,
        scale_dtype=spec.scheme.scale_dtype,
        nbytes=nbytes,
        effective_bits=8 * nbytes / (spec.in_features * spec.out_features),
        problem=stored.problem,
    )


def _in_words(scheme: Scheme) -> str:
    """``mxfp4: fp4_e2m1, groups of 32, signed``; the name is left out where it is the element's."""
    name = named_scheme(scheme)
    return scheme.describe() if name in ("", scheme.element.name) else f"{name}: {scheme.describe()}"


def _symmetry(facts: list[ModuleFacts]) -> str:
    kinds = {module.symmetric for module in facts}
    if None in kinds:
        return "unknown"
    return "mixed" if len(kinds) > 1 else "symmetric" if True in kinds else "asymmetric"


def _order(quantized: QuantizedCheckpoint, facts: list[ModuleFacts]) -> str:
    extras = any(spec.extras for spec in quantized.modules.values())
    if not extras and not any(layout.stores_order for layout in quantized.layouts.values()):
        return "none"
    kinds = {module.g_idx for module in facts}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _notes(
    facts: list[ModuleFacts], layers: dict[str, LinearFacts], tensor_parallel: int, *, own_head: str | None
) -> Iterable[str]:
    broken = [module for module in facts if module.problem is not None]
    if broken:
        more = f" (and {len(broken) - 1} more modules)" if len(broken) > 1 else ""
        yield f"{broken[0].name}: {broken[0].problem}{more}"
    flagged = [module for module in facts if layers[module.name].declared_act_order]
    if flagged and all(module.g_idx == "in order" for module in flagged):
        yield "the config says desc_act: true, but every g_idx is in order; converting it writes false"
    silent = [module for module in facts if module.g_idx == "activation order" and module not in flagged]
    if silent:
        yield (
            f"{silent[0].name}: the g_idx is in activation order, but the config says desc_act: false; "
            "loaders that trust the config compute wrong results"
        )
    wrong = [
        module for module in facts if layers[module.name].declared_symmetric and module.symmetric is False
    ]
    if wrong:
        yield f"{wrong[0].name}: the config says symmetric, but the stored zero points differ"
    if own_head is not None:
        yield (
            f"{own_head}, but the config says tie_word_embeddings: true; loaders that "
            "trust it multiply by the embedding instead; converting it writes false"
        )
    inside = sum(len(members) for members in experts(layers).values())
    if inside:
        yield (
            f"{inside} linears belong to experts, which servers fuse; their kernels are judged as those of "
            "dense layers (docs/serve.md has the rules)"
        )
    whole = unknown_axes(layers) if tensor_parallel > 1 else []
    if whole:
        yield (
            f"{whole[0]}: no axis is known for its name ({len(whole)} such linears); "
            "judged as if every GPU held all of it"
        )


def _draft_notes(quantized: QuantizedCheckpoint, unquantized: tuple[str, ...]) -> Iterable[str]:
    """Note on how loaders treat a draft head (multi-token prediction)."""
    damaged = damaged_draft(quantized.checkpoint, quantized.passthrough)
    if damaged is not None:
        yield damaged
        return
    head = find_draft_head(quantized.checkpoint.tensors)
    if head is not None and (head.layer is None or quantized.beyond_blocks(head.block)):
        yield "marlinq drafts with the checkpoint's draft head (`marlinq generate --speculate mtp`)"
    rules = quantized.config.rules
    carried = [
        name
        for name in unquantized
        if name.startswith("mtp.") or (".layers." in name and quantized.beyond_blocks(name))
    ]
    if not carried:
        return
    for server in servers():
        if not server.parallel:
            continue
        wrong = [name for name in carried if rules.scheme(name) is not None]
        for whole, members in server.fused.items() if server.fused_drafts else ():
            fused = {f"{name.rpartition('.')[0]}.{whole}" for name in carried if name.endswith(members)}
            wrong += sorted(name for name in fused if rules.scheme(name) is not None)
        if wrong:
            yield (
                f"{wrong[0]}: the draft head is stored in 16 bits, but the config does not say so of this "
                f"name, by which {server.name} {server.version} asks, so it accepts no draft; convert it, "
                "which writes a pattern"
            )
        else:
            yield (
                f"the draft head ({carried[0]}, {counted(len(carried), 'linears')}) is in 16 bits, as the "
                f"config says; {server.name} {server.version} can draft with it"
            )


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
