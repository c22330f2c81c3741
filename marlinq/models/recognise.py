"""Recognises a decoder's computation from its behaviour, not from names.

A model without weights runs once on a few tokens, with linears, norms, embeddings and attention replaced by
stubs that return random numbers (:mod:`marlinq.models.recording`). Each input of a part is then explained by
earlier outputs: equal, scaled, rotated, activated, added. An input without explanation, or a parameter
without known use, ends recognition with the part and the reason.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.core.errors import UnsupportedError
from marlinq.models.anatomy import (
    MLP,
    Anatomy,
    Attention,
    Groups,
    InputGate,
    LatentAttention,
    Layer,
    LayerInputs,
    Mamba,
    Mixture,
    Norm,
    Router,
    Slices,
    Unrecognised,
)
from marlinq.models.blueprint import decoder_blocks
from marlinq.models.building import parameters_on_meta
from marlinq.models.formulas import (
    ACTIVATIONS,
    TOLERANCE,
    ExpertActivation,
    NormFormula,
    clamped_swiglu,
    close,
    factor,
    norm_formula,
    tidy,
    tidy_root,
)
from marlinq.models.fused_experts import find_experts
from marlinq.models.linears import is_linear
from marlinq.models.recognise_attention import FORWARD_ERRORS, RotaryModules, attention_part
from marlinq.models.recognise_groups import chosen_by, find_groups
from marlinq.models.recognise_latent import find_expansion, latent_part
from marlinq.models.recognise_mixers import Mixer, find_mixers
from marlinq.models.recording import TOKENS, AttentionCall, Call, ExpertsCall, Recording, Refusal, record

T = TypeVar("T")

_ANY_WIDTH = 64
_CHOICES = 256
"""recorded choices of corrected routers, over all layers, from which groups of experts are found"""
_LEAST_SEEDS = 3
"""recordings besides the first, of which the last has larger corrections than the others"""
_SEED = 17


def recognise(model: PreTrainedModel, blocks_name: str) -> Anatomy | Unrecognised:
    """The anatomy of a causal language model, or the first part that is not understood.

    Args:
        model: model in evaluation mode and in the dtype of its activations, with parameters on any device,
            also meta, and buffers on the CPU (as from ``Blueprint.build()``); not changed.
        blocks_name: full name of the list of decoder blocks (:attr:`Blueprint.blocks_name`).
    """
    blocks = list(model.get_submodule(blocks_name).children())
    names = [f"{blocks_name}.{index}" for index in range(len(blocks))]
    try:
        norms = _find_norms(model)
        experts: dict[str, _RoutedExperts] = {}
        mixers: dict[str, Mixer] = {}
        vectors: dict[str, tuple[int, ...]] = {}
        routing: dict[str, tuple[int, ...]] = {}
        config = model.config.get_text_config()
        heads, hidden = (getattr(config, key, None) for key in ("num_attention_heads", "hidden_size"))
        for name, block in zip(names, blocks, strict=True):
            experts |= _find_routed(name, block)
            mixers |= find_mixers(name, block)
            routing |= _routing_vectors(name, block, experts, norms, hidden)
            vectors |= _maybe_sinks(name, block, heads, mixers)
            _check_parameters(name, block, norms, experts, mixers, {*vectors, *routing})
        rotary = RotaryModules(model)
        far = _far(model, rotary)
        corrections = {
            name: routed.correction for name, routed in experts.items() if routed.correction is not None
        }
        randomised = [*corrections.values(), *_stream_scales(names, blocks)]

        def recorded(start: int, seed: int = _SEED) -> Recording:
            blocks = [model.get_submodule(name) for name in names]
            widths = {name: norm.width for name, norm in norms.items()}
            counts = {name: routed.count for name, routed in experts.items()}
            return record(model, blocks, widths, start, counts, randomised, seed, mixers, routing)

        routers: dict[str, set[Router]] = {}

        def anatomy_in(recording: Recording) -> Anatomy:
            return _anatomy(model, names, norms, rotary, experts, mixers, groups, recording, routers)

        try:
            choosing = {name: found.correction for name, found in experts.items()}
            recordings = [recorded(0)]
            # Groups and corrections change few choices, so more recordings are made to find them: if routers
            # may have a correction, or if the first recording already shows groups.
            more = 0
            if corrections or find_groups(recordings, choosing) is not None:
                more = max(_LEAST_SEEDS, -(-_CHOICES // (TOKENS * len(experts))))
            elif any(
                math.prod(shape) == each.count for shape in routing.values() for each in experts.values()
            ):
                more = _LEAST_SEEDS
            recordings += [recorded(0, seed) for seed in range(more)]
            groups = find_groups(recordings, choosing)
            distant = None if far is None else recorded(far)
            if experts:
                # Afterwards every choice of a router explains all recordings.
                for recording in (*recordings, *([] if distant is None else [distant])):
                    anatomy_in(recording)
            anatomy = anatomy_in(recordings[0])
            if distant is not None and anatomy != anatomy_in(distant):
                reason = f"its forward pass is another one at position {far} than at 0"
                raise Refusal(type(model).__name__, reason)
            if any(anatomy != anatomy_in(recording) for recording in recordings[1:]):
                raise Refusal(type(model).__name__, "its forward pass is another one each time")
            for layer in anatomy.layers:
                if isinstance(layer.attention, Attention):
                    vectors.pop(layer.attention.sinks or "", None)
                if isinstance(layer.mlp, Mixture):
                    router = layer.mlp.router
                    for used in (router.correction, router.input_scale, router.expert_scale, router.bias):
                        routing.pop(used or "", None)
            _refuse_strange({**vectors, **routing})
        except FORWARD_ERRORS as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise Refusal(
                type(model).__name__, f"its forward pass can't be recorded ({first_line})"
            ) from error
        return anatomy
    except Refusal as refusal:
        return Unrecognised(refusal.part, refusal.reason)


def _stream_scales(names: Sequence[str], blocks: Sequence[nn.Module]) -> list[str]:
    """Full names of the blocks' own buffers of one number."""
    return [
        f"{name}.{key}"
        for name, block in zip(names, blocks, strict=True)
        for key, buffer in block.named_buffers(recurse=False)
        if tuple(buffer.shape) == (1,) and buffer.is_floating_point()
    ]


def anatomy_of(model: PreTrainedModel) -> Anatomy | Unrecognised:
    """The result of :func:`recognise` for a loaded model, from a copy without weights.

    Args:
        model: model with its weights, which may be quantised, on any device; not changed.
    """
    config = deepcopy(model.config)
    # The copy has transformers' own linears.
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with parameters_on_meta():
        twin: PreTrainedModel = type(model)._from_config(config, dtype=model.dtype)
    twin.eval()
    try:
        blocks_name, _ = decoder_blocks(twin, "model")
    except UnsupportedError:
        return Unrecognised(type(model).__name__, "no list of modules in it holds linears")
    return recognise(twin, blocks_name)


def _find_norms(model: PreTrainedModel) -> dict[str, Norm]:
    norms: dict[str, Norm] = {}
    probed: dict[tuple[object, ...], NormFormula | None] = {}
    for name, module in model.named_modules():
        if is_linear(module) or any(True for _ in module.children()) or any(True for _ in module.buffers()):
            continue
        shapes = {key: tuple(value.shape) for key, value in module.named_parameters()}
        if any(len(shape) != 1 for shape in shapes.values()) or not shapes.keys() <= {"weight", "bias"}:
            continue
        width = next(iter(shapes.values()))[0] if shapes else _declared_width(module)
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (int, float, bool))}
        key = (type(module), tuple(shapes.items()), width, tuple(sorted(plain.items())))
        if key not in probed:
            probed[key] = norm_formula(module, width or _ANY_WIDTH)
        norm = probed[key]
        if norm is not None:
            norms[name] = Norm(name, norm.kind, norm.eps, norm.offset, norm.narrow_first, width)
    return norms


def _declared_width(module: nn.Module) -> int:
    """Channels of a norm without a weight, from ``normalized_shape``; 0 if it takes any number."""
    shape = getattr(module, "normalized_shape", None)
    return int(shape[-1]) if isinstance(shape, (tuple, list)) and shape else 0


@dataclass(frozen=True)
class _RoutedExperts:
    """A module of experts.

    Attributes:
        count: number of experts.
        gated: whether the first product has a gate.
        activation: activation between an expert's products, of the gate if there is one.
        routers: full names of the modules beside it that may make the router's logits.
        correction: full name of the buffer beside it with one number per expert; None without one.
    """

    count: int
    gated: bool
    activation: ExpertActivation
    routers: tuple[str, ...]
    correction: str | None


def _find_routed(name: str, block: nn.Module) -> dict[str, _RoutedExperts]:
    """Full name -> description of the modules of experts in ``block``, proved on random weights."""
    routed: dict[str, _RoutedExperts] = {}
    for inner, module in block.named_modules():
        if not any(value.dim() == 3 for value in module.parameters(recurse=False)):
            continue
        full = f"{name}.{inner}"
        try:
            experts = find_experts(full, module, (), _proved_experts)
        except UnsupportedError:
            continue  # _check_parameters refuses them
        if experts is None or not experts.routed:
            continue
        between = experts.activation(module)
        activation = _expert_activation(between) if experts.gated else _plain_activation(between)
        if activation is None:
            raise Refusal(full, "the function between its products is no known activation")
        parent = inner.rpartition(".")[0]
        around = block.get_submodule(parent) if parent else block
        around_name = ".".join(part for part in (name, parent) if part)
        # A block's own buffers of one number multiply the residual stream.
        beside_experts = {
            key: buffer for key, buffer in around.named_buffers() if parent or tuple(buffer.shape) != (1,)
        }
        buffers = [f"{around_name}.{key}" for key in beside_experts]
        for key, buffer in beside_experts.items():
            if tuple(buffer.shape) != (experts.count,) or not buffer.is_floating_point() or len(buffers) > 1:
                raise Refusal(f"{around_name}.{key}", "a buffer beside routed experts")
        routers = []
        for beside, other in around.named_modules():
            shapes = [tuple(value.shape) for value in other.parameters(recurse=False)]
            # With any number of columns, because some experts read fewer channels than their router.
            weight, bias = (experts.count, *(shapes[0][1:] if shapes else ())), (experts.count,)
            if not is_linear(other) and len(weight) == 2 and shapes in ([weight], [weight, bias]):
                routers.append(".".join(part for part in (around_name, beside) if part))
        correction = buffers[0] if buffers else None
        found = (experts.count, experts.gated, activation, tuple(routers), correction)
        routed[full] = _RoutedExperts(*found)
    return routed


# Classes and layouts of experts that were proved already.
_proved_experts: set[tuple[object, ...]] = set()


def _expert_activation(gate: Callable[[Tensor], Tensor]) -> ExpertActivation | None:
    """The activation that ``gate`` ([T, 2I] to [T, I]) applies to the first half; None if it is unknown."""
    first = torch.linspace(-9.0, 9.0, 96).view(3, 32)
    second = first.flip(1) + 0.5
    with torch.no_grad():
        given = gate(torch.cat((first, second), -1))
    for activation, function in ACTIVATIONS.items():
        if close(given, function(first) * second):
            return activation
    return "clamped_swiglu" if close(given, clamped_swiglu(first, second)) else None


def _plain_activation(function: Callable[[Tensor], Tensor]) -> ExpertActivation | None:
    """The activation that ``function`` is; None if it is unknown."""
    x = torch.linspace(-9.0, 9.0, 96)
    with torch.no_grad():
        given = function(x)
    return next((name for name, known in ACTIVATIONS.items() if close(given, known(x))), None)


def _check_parameters(
    name: str,
    block: nn.Module,
    norms: dict[str, Norm],
    experts: dict[str, _RoutedExperts],
    mixers: dict[str, Mixer],
    vectors: Collection[str],
) -> None:
    """Refuses a block with parameters of no known use; ``vectors`` are looked at later."""
    used = {*experts, *(router for routed in experts.values() for router in routed.routers)}
    strange: dict[str, tuple[int, ...]] = {}
    for inner, module in block.named_modules():
        full = f"{name}.{inner}" if inner else name
        if any(full == mixer or full.startswith(f"{mixer}.") for mixer in mixers):
            continue
        if not is_linear(module) and full not in norms and full not in used:
            parameters = module.named_parameters(recurse=False)
            strange |= {
                f"{full}.{key}": tuple(value.shape)
                for key, value in parameters
                if f"{full}.{key}" not in vectors
            }
    _refuse_strange(strange)


def _maybe_sinks(
    name: str, block: nn.Module, heads: int | None, mixers: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Full names and shapes of parameters that attention may take as sinks: one number a head, beside three
    linears or more."""
    return {
        f"{name}.{inner}.{key}": tuple(value.shape)
        for inner, module in block.named_modules()
        if inner and f"{name}.{inner}" not in mixers and sum(map(is_linear, module.children())) >= 3
        for key, value in module.named_parameters(recurse=False)
        if value.shape == (heads,)
    }


def _routing_vectors(
    name: str,
    block: nn.Module,
    experts: Mapping[str, _RoutedExperts],
    norms: Collection[str],
    hidden: int | None,
) -> dict[str, tuple[int, ...]]:
    """Full names and shapes of parameters that a router may use besides its product: a number for each expert
    or for each of ``hidden`` channels, in modules beside the experts or around them."""
    found: dict[str, tuple[int, ...]] = {}
    for expert, routed in experts.items():
        if not expert.startswith(f"{name}."):
            continue
        inner = expert.removeprefix(f"{name}.").rpartition(".")[0]
        around = block.get_submodule(inner) if inner else block
        prefix = f"{name}.{inner}" if inner else name
        for beside, module in around.named_modules():
            full = f"{prefix}.{beside}" if beside else prefix
            if is_linear(module) or full in norms or full in experts:
                continue
            for key, value in module.named_parameters(recurse=False):
                if value.numel() == max(value.shape) and value.numel() in (routed.count, hidden):
                    found[f"{full}.{key}"] = tuple(value.shape)
    return found


def _refuse_strange(strange: Mapping[str, tuple[int, ...]]) -> None:
    """Raises a refusal that names the largest of these parameters, if there are any."""
    if strange:
        part, shape = max(strange.items(), key=lambda item: math.prod(item[1]))
        raise Refusal(part, f"a parameter of shape {list(shape)} that belongs to no linear and no known norm")


def _far(model: PreTrainedModel, rotary: RotaryModules) -> int | None:
    """The last position at which the model is recorded; None if it takes no positions.

    It is far, because some models scale queries only at positions above some thousands.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    return max(0, min([int(longest), *rotary.limits()]) - TOKENS) or None


def _anatomy(
    model: PreTrainedModel,
    names: Sequence[str],
    norms: dict[str, Norm],
    rotary: RotaryModules,
    experts: dict[str, _RoutedExperts],
    mixers: dict[str, Mixer],
    groups: Groups | None,
    recording: Recording,
    routers: dict[str, set[Router]],
) -> Anatomy:
    """The anatomy from one recording; ``groups``: groups of experts that routers choose first; ``routers``:
    module of experts -> routers that explain its calls in every recording so far, which are updated."""
    called = {call.name: call.input.shape[-1] for call in recording.calls if call.kind == "norm"}
    norms = {name: replace(norms[name], width=width) for name, width in called.items()}
    if len(recording.outputs) != len(names):
        raise Refusal(names[len(recording.outputs)], "does not run in a forward pass")
    before, after = _outside(recording.calls)
    entry = _Entry(before, recording, norms)
    layers = []
    for index, name in enumerate(names):
        entered = recording.inputs[index]
        if index and not torch.equal(entered, recording.outputs[index - 1]):
            raise Refusal(name, "does not get the hidden states of the block before it as they are")
        calls = [call for call in recording.calls if call.block == index]
        layers.append(
            _Block(
                *(model, name, calls, norms, rotary, experts, mixers, recording.corrections, groups),
                *(entered, recording.outputs[index]),
                recording.vectors[index] if entry.layer_inputs is not None else [],
                [each for each in recording.calls if isinstance(each, AttentionCall) and each.block < index],
                routers,
            ).layer(recording.positions)
        )
    for layer in layers:
        if isinstance(layer.attention, LatentAttention):
            expansion = layer.attention.expansion
            if getattr(model.get_submodule(expansion), "bias", None) is not None:
                raise Refusal(expansion, "has a bias, which the queries of latent attention can't absorb")
    final_norm, head, scale, softcap = _exit(model, after, recording, norms)
    return Anatomy(
        embedding=entry.embedding,
        layers=tuple(layers),
        final_norm=final_norm,
        head=head,
        embedding_scale=entry.scale,
        positions=entry.positions,
        positions_offset=entry.offset,
        embedding_norm=entry.norm,
        logit_scale=scale,
        logit_softcap=softcap,
        layer_inputs=entry.layer_inputs,
    )


def _outside(calls: Sequence[Call]) -> tuple[list[Call], list[Call]]:
    """(calls before the first block, calls after the last).

    Raises:
        Refusal: there are calls between blocks.
    """
    inside = [place for place, call in enumerate(calls) if call.block >= 0]
    if not inside:
        raise Refusal("model", "no linear and no attention runs inside a decoder block")
    for call in calls[inside[0] : inside[-1]]:
        if call.block < 0:
            raise Refusal(call.name, "runs between two decoder blocks")
    return list(calls[: inside[0]]), list(calls[inside[-1] + 1 :])


class _Entry:
    """The part of the model from token ids to the first block."""

    def __init__(self, calls: Sequence[Call], recording: Recording, norms: dict[str, Norm]) -> None:
        self.layer_inputs = _layer_inputs(calls, recording, norms)
        if self.layer_inputs is not None:
            inner = (getattr(self.layer_inputs, name) for name in ("embedding", "projection"))
            known = {*inner, self.layer_inputs.norm.module}
            calls = [call for call in calls if call.name not in known]
        lookups = [call for call in calls if call.kind == "embedding"]
        normalised = [call for call in calls if call.kind == "norm"]
        strange = [call for call in calls if call not in lookups and call not in normalised]
        if strange:
            raise Refusal(strange[0].name, "a linear runs before the first block")
        if not lookups or not torch.equal(lookups[0].input, recording.ids):
            raise Refusal("model", "does not look its tokens up in an embedding")
        if len(lookups) > 2 or len(normalised) > 1:
            raise Refusal((lookups[2:] or normalised[1:])[0].name, "is not expected before the first block")
        self.embedding = lookups[0].name
        self.positions: str | None = None
        self.offset = 0
        self.norm: Norm | None = None
        entered = recording.inputs[0]
        if normalised:
            self.norm = norms[normalised[0].name]
            if not torch.equal(entered, normalised[0].output):
                raise Refusal(normalised[0].name, "what follows this norm is not understood")
            entered = normalised[0].input
        if len(lookups) == 2:
            self.positions = lookups[1].name
            shift = lookups[1].input.flatten() - recording.positions
            self.offset = int(shift[0])
            if shift.numel() != TOKENS or bool((shift != self.offset).any()) or self.offset < 0:
                raise Refusal(self.positions, "is not looked up at the positions of the tokens")
            entered = entered - lookups[1].output.reshape(1, TOKENS, -1)
        scale = factor(entered, lookups[0].output) if entered.shape == lookups[0].output.shape else None
        if scale is None:
            raise Refusal(self.embedding, "what enters the first block is not a multiple of the embedding")
        self.scale = scale


def _layer_inputs(
    calls: Sequence[Call], recording: Recording, norms: Mapping[str, Norm]
) -> LayerInputs | None:
    """The vectors that blocks are called with besides hidden states, from the calls before the first block;
    None if these have another pattern."""
    first, blocks = recording.inputs[0], len(recording.inputs)
    projections = [call for call in calls if call.kind == "linear" and torch.equal(call.input, first)]
    lookups = [call for call in calls if call.kind == "embedding" and torch.equal(call.input, recording.ids)]
    given = [recording.vectors[index] for index in range(blocks)]
    if len(projections) != 1 or len(lookups) != 2 or any(len(each) != 1 for each in given):
        return None
    projected, looked_up = projections[0], lookups[1]
    vectors = torch.stack([each[0] for each in given], 2)
    shape = (1, TOKENS, blocks, -1)
    normed = next((call for call in calls if call.kind == "norm" and call.input.dim() == 4), None)
    if normed is None or normed.input.shape != vectors.shape:
        return None
    if not projected.output.numel() == looked_up.output.numel() == vectors.numel():
        return None
    projection_scale = factor(normed.input, projected.output.view(shape))
    table = looked_up.output.view(shape)
    both = torch.stack((normed.output.flatten(), table.flatten()), 1).double()
    scale, of_table = torch.linalg.lstsq(both, vectors.flatten().double()[:, None]).solution[:, 0].tolist()
    if projection_scale is None or not scale:
        return None
    scale, embedding_scale = tidy_root(scale), tidy_root(of_table / scale)
    if not close(vectors, scale * (normed.output + embedding_scale * table)):
        return None
    return LayerInputs(
        embedding=looked_up.name,
        embedding_scale=embedding_scale,
        projection=projected.name,
        projection_scale=projection_scale,
        norm=norms[normed.name],
        scale=scale,
    )


def _exit(
    model: PreTrainedModel, calls: Sequence[Call], recording: Recording, norms: dict[str, Norm]
) -> tuple[Norm | None, str, float, float | None]:
    """(final norm, head, logit scale, soft cap)."""
    hidden = recording.outputs[len(recording.outputs) - 1]
    norm: Norm | None = None
    calls = list(calls)
    if calls and calls[0].kind == "norm":
        call = calls.pop(0)
        if not torch.equal(call.input, hidden):
            raise Refusal(call.name, "does not normalise what the last block returns")
        norm, hidden = norms[call.name], call.output
    entered = factor(calls[0].input, hidden) if len(calls) == 1 and calls[0].kind == "linear" else None
    if entered is None:
        part = calls[1].name if len(calls) > 1 else "model"
        raise Refusal(part, "behind the last block there is more than a norm and a head")
    head = calls[0]
    if entered != 1 and getattr(model.get_submodule(head.name), "bias", None) is not None:
        raise Refusal(head.name, f"its input is scaled by {entered:g}, and it has a bias")
    scale = factor(recording.logits, head.output)
    if scale is not None:
        return norm, head.name, tidy(entered * scale), None
    if entered != 1:
        raise Refusal(head.name, f"its input is scaled by {entered:g} and its logits are capped")
    numbers = {value for value in vars(model.config.get_text_config()).values() if isinstance(value, float)}
    for cap in sorted(value for value in numbers if value > 0):
        for logit_scale in sorted({1.0, *numbers} - {0.0}):
            capped = cap * torch.tanh(head.output * logit_scale / cap)
            if close(recording.logits, capped):
                return norm, head.name, logit_scale, cap
    raise Refusal(head.name, "logits are neither a multiple of the head's product nor capped by tanh")


def _numbers(values: object) -> Iterator[float]:
    """All numbers of a config that may be factors: neither whole nor near zero."""
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _numbers(value)
    elif isinstance(values, float) and not values.is_integer() and 1e-3 < abs(values) < 1e3:
        yield values


@dataclass(frozen=True, eq=False)
class _Part(Generic[T]):
    """Attention or the MLP of a recorded block.

    Attributes:
        what: name of the value in messages.
        anatomy: description of it.
        reader, writer: full names of the modules that read its input and make its result.
        norm, post: norms before and behind it, or None.
        reads: input of ``norm``.
        output: result, behind ``post``.
        input_scale: factor on the input, in the anatomy of attention already, and still on its result.
        beside: mixer beside attention, or None.
    """

    what: str
    anatomy: T
    reader: str
    writer: str
    norm: Norm | None
    post: Norm | None
    reads: Tensor
    output: Tensor
    input_scale: float = 1.0
    beside: _Beside | None = None


@dataclass(frozen=True, eq=False)
class _Beside:
    """A mixer beside attention, and its result."""

    anatomy: Mamba
    output: Tensor


class _Block:
    """The calls of one decoder block and the connections between them."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        calls: list[Call],
        norms: dict[str, Norm],
        rotary: RotaryModules,
        experts: dict[str, _RoutedExperts],
        mixers: dict[str, Mixer],
        corrections: dict[str, Tensor],
        groups: Groups | None,
        entered: Tensor,
        left: Tensor,
        vectors: Sequence[Tensor],
        earlier: Sequence[AttentionCall],
        routers: dict[str, set[Router]],
    ) -> None:
        self.model = model
        self.name = name
        self.calls = calls
        self.norms = norms
        self.rotary = rotary
        self.experts = experts
        self.mixers = mixers
        self.corrections = corrections
        self.groups = groups
        self.entered = entered
        scales = [each for each in corrections if each.rpartition(".")[0] == name]
        self.stream_scale = scales[0] if len(scales) == 1 else None
        self.left = left if self.stream_scale is None else left / corrections[self.stream_scale]
        self.vectors = vectors
        self.earlier = earlier
        self.routers = routers
        self.unexplained = list(calls)

    def layer(self, positions: Tensor) -> Layer:
        attended = self._attended(positions)
        gated = self._input_gate()
        behind = None if attended is not None and not self.unexplained else self._mlp_part(attended)
        if self.unexplained:
            raise Refusal(self.unexplained[0].name, "its part in the block is not understood")
        parts = [part for part in (attended, behind, gated) if part is not None]
        for part in parts:
            for name, x in ((part.writer, part.output), (part.reader, part.reads)):
                if x.shape != self.entered.shape:
                    raise Refusal(name, f"{list(x.shape)} where the block has {list(self.entered.shape)}")
        both = attended is not None and behind is not None
        parallel = both and all(torch.equal(part.reads, self.entered) for part in parts)
        if gated is not None and parallel:
            raise Refusal(gated.reader, "a gate of the layer's own inputs in a parallel block")
        beside = None if attended is None else attended.beside
        beside_scale = 1.0
        if parallel:
            if beside is not None:
                raise Refusal(beside.anatomy.output, "a mixer beside attention in a parallel block")
            total = sum((part.output for part in parts), torch.zeros_like(self.entered))
            scales = [self._scale(self.left - self.entered, total, "sum of attention and MLP")] * 2
        else:
            between = [self.entered, *(part.reads for part in parts[1:]), self.left]
            scales = []
            for part, start, end in zip(parts, between[:-1], between[1:], strict=True):
                added = end - start
                if part is attended and beside is not None:
                    beside_scale = self._share(added, beside.output, part.output)
                    added = added - beside_scale * beside.output
                scales.append(self._scale(added, part.output, part.what))
            if gated is not None and scales.pop() != 1:
                raise Refusal(gated.writer, "its result is multiplied before it is added")
        return Layer(
            name=self.name,
            attention=None if attended is None else attended.anatomy,
            mlp=None if behind is None else behind.anatomy,
            attention_norm=None if attended is None else attended.norm,
            mlp_norm=None if behind is None else behind.norm,
            post_attention_norm=None if attended is None else attended.post,
            post_mlp_norm=None if behind is None else behind.post,
            parallel=parallel,
            attention_scale=1.0 if attended is None else tidy(scales[0] * attended.input_scale),
            mlp_scale=1.0 if behind is None else scales[-1],
            beside=None if beside is None else beside.anatomy,
            beside_scale=beside_scale,
            input_gate=None if gated is None else gated.anatomy,
            stream_scale=self.stream_scale,
        )

    def _attended(self, positions: Tensor) -> _Part[Attention | LatentAttention | Mixer] | None:
        """Attention or a mixer in its place; None in a block of a single MLP."""
        mixed = [call for call in self.calls if isinstance(call, AttentionCall) or call.kind == "mixer"]
        attending = [call for call in mixed if isinstance(call, AttentionCall)]
        if len(mixed) > 2 or (len(mixed) == 2 and len(attending) != 1):
            raise Refusal(self.name, "computes attention more than once")
        if not mixed:
            linears = [call for call in self.calls if call.kind == "linear"]
            if len(linears) > 3 and not any(isinstance(call, ExpertsCall) for call in self.calls):
                reason = "does not compute attention through transformers' attention interface"
                raise Refusal(self.name, reason)
            return None
        call = (attending or mixed)[0]
        attention: Attention | LatentAttention | Mixer
        if isinstance(call, AttentionCall):
            place = self.calls.index(call)
            before, after, rotary = self.calls[:place], self.calls[place + 1 :], self.rotary.at(positions)
            expansion = find_expansion(call, before)
            if expansion is None:
                attention, used, given, output = attention_part(
                    *(call, before, after, self.norms, rotary, self.earlier)
                )
            else:
                attention, used, given, output = latent_part(
                    call, expansion, before, after, self.norms, rotary
                )
            reader, result = used[0].name, output.output
        else:
            attention, used, given, reader, result = (
                self.mixers[call.name],
                [],
                call.input,
                call.name,
                call.output,
            )
        for each in (call, *used):
            self.unexplained.remove(each)
        result, post = self._post_norm(result)
        given, input_scale = self._unscaled(given)
        norm, reads = self._source(given, reader)
        if not self._enters(reads):
            raise Refusal(reader, "attention does not read what enters the block, nor a norm of it")
        if input_scale != 1:
            attention = self._of_scaled(attention, input_scale)
        part = _Part("attention", attention, reader, attention.output, norm, post, reads, result)
        beside = next((each for each in mixed if each is not call), None)
        if beside is None:
            return replace(part, input_scale=input_scale)
        found = self.mixers[beside.name]
        if not isinstance(found, Mamba) or post is not None or not torch.equal(beside.input, given):
            raise Refusal(beside.name, "is no Mamba-2 mixer that reads what attention reads")
        self.unexplained.remove(beside)
        return replace(part, input_scale=input_scale, beside=_Beside(found, beside.output))

    def _unscaled(self, x: Tensor) -> tuple[Tensor, float]:
        """(output of a norm of the block, factor) whose product is ``x``; ``x`` and 1 without such a norm."""
        outputs = [call.output for call in self.calls if call.kind == "norm"]
        if not any(torch.equal(output, x) for output in outputs):
            for output in outputs:
                scale = factor(x, output)
                if scale is not None:
                    return output, scale
        return x, 1.0

    def _of_scaled(self, attention: Attention | LatentAttention | Mixer, scale: float) -> Attention:
        """Attention that gives 1 / ``scale`` of what ``attention`` gives for inputs times ``scale``.

        Queries and keys are linear in the input, without biases and norms of heads, and so are values."""
        if not isinstance(attention, Attention) or attention.query_norm or attention.key_norm:
            raise Refusal(attention.output, f"its input is multiplied by {scale:g}")
        for name in attention.qkv.modules:
            if getattr(self.model.get_submodule(name), "bias", None) is not None:
                raise Refusal(name, f"has a bias, and its input is multiplied by {scale:g}")
        return replace(attention, scale=tidy(attention.scale * scale**2))

    def _mlp_part(self, attended: _Part[Attention | LatentAttention | Mixer] | None) -> _Part[MLP | Mixture]:
        routed = [call for call in self.unexplained if isinstance(call, ExpertsCall)]
        mlp: MLP | Mixture
        mlp, given, result = self._mixture(routed) if routed else self._mlp()
        reader = mlp.experts if isinstance(mlp, Mixture) else mlp.inputs.modules[0]
        writer = mlp.experts if isinstance(mlp, Mixture) else mlp.down
        result, post = self._post_norm(result)
        norm, reads = self._source(given, reader, shared=None if attended is None else attended.norm)
        if attended is None and not self._enters(reads):
            raise Refusal(reader, "the MLP does not read what enters the block, nor a norm of it")
        return _Part("MLP", mlp, reader, writer, norm, post, reads, result)

    def _input_gate(self) -> _Part[InputGate] | None:
        """The part that reads the layer's own vector, which the block is called with; None without one."""
        linears = [call for call in self.unexplained if call.kind == "linear"]
        for vector, gate, writer in product(self.vectors, linears, linears):
            if not gate.output.shape == vector.shape == writer.input.shape:
                continue
            for activation, function in ACTIVATIONS.items():
                if not close(writer.input, function(gate.output) * vector):
                    continue
                self.unexplained.remove(gate)
                self.unexplained.remove(writer)
                result, post = self._post_norm(writer.output)
                found = InputGate(gate.name, activation, writer.name, post)
                what = "gated inputs of the layer"
                return _Part(what, found, gate.name, writer.name, None, post, gate.input, result)
        return None

    def _enters(self, reads: Tensor) -> bool:
        """Whether ``reads`` is what enters the block, which some blocks cast to the dtype of a norm's weight.

        The recording adds in float32 what a model of that dtype has rounded already."""
        narrow = (self.entered.to(dtype).to(reads.dtype) for dtype in (torch.bfloat16, torch.float16))
        return torch.equal(reads, self.entered) or any(torch.equal(reads, each) for each in narrow)

    def _scale(self, difference: Tensor, addend: Tensor, what: str) -> float:
        # The tolerance is relative to the sums, whose rounding a difference of them contains.
        wide, narrow = difference.double(), addend.double()
        value = tidy(float((wide * narrow).sum() / (narrow * narrow).sum()))
        size = float(torch.stack((self.entered, self.left, addend)).abs().max())
        if float((wide - value * narrow).abs().max()) > 2e-6 * size or not value:
            raise Refusal(self.name, f"what is added to the residual stream is no multiple of the {what}")
        return value

    def _share(self, total: Tensor, first: Tensor, second: Tensor) -> float:
        """The factor of ``first`` in ``total``, a sum of multiples of ``first`` and ``second``."""
        both = torch.stack((first.flatten(), second.flatten()), 1).double()
        return tidy(float(torch.linalg.lstsq(both, total.flatten().double()[:, None]).solution[0]))

    def _post_norm(self, x: Tensor) -> tuple[Tensor, Norm | None]:
        for call in self.unexplained:
            if call.kind == "norm" and torch.equal(call.input, x):
                self.unexplained.remove(call)
                return call.output, self.norms[call.name]
        return x, None

    def _source(self, x: Tensor, reader: str, shared: Norm | None = None) -> tuple[Norm | None, Tensor]:
        """(norm that computed ``x``, the norm's input), or (None, ``x``)."""
        for call in self.calls:
            if call.kind == "norm" and torch.equal(call.output, x):
                if call in self.unexplained:
                    self.unexplained.remove(call)
                elif shared is None or shared.module != call.name:
                    raise Refusal(reader, f"reads {call.name}, which has another part in the block")
                return self.norms[call.name], call.input
        return None, x

    def _mixture(self, routed: Sequence[ExpertsCall]) -> tuple[Mixture, Tensor, Tensor]:
        """(routed MLP, its input, its output)."""
        if len(routed) != 1:
            raise Refusal(routed[1].name, "experts run twice in a block")
        call = routed[0]
        self.unexplained.remove(call)
        found = self.experts[call.name]
        router, logits = self._router(call, found)
        self.unexplained.remove(logits)
        # A linear to fewer channels may stand before the experts, and one back behind them.
        linears = [each for each in self.unexplained if each.kind == "linear"]
        into = next((each for each in linears if torch.equal(each.output, call.input)), None)
        out = next((each for each in linears if torch.equal(each.input, call.output)), None)
        for each in (into, out):
            if each is not None:
                self.unexplained.remove(each)
        given = call.input if into is None else into.input
        if not torch.equal(logits.input, given):
            return self._apart(call, found, router, logits)
        m, shared, shared_gate = call.output if out is None else out.output, None, None
        gates = [each for each in self.unexplained if each.kind == "linear" and each.output.shape[-1] == 1]
        for gate in gates[:1]:
            self.unexplained.remove(gate)
            if not torch.equal(gate.input, given):
                raise Refusal(gate.name, f"does not read what {call.name} reads")
            shared_gate = gate.name
        if any(each.kind == "linear" for each in self.unexplained):
            shared, shared_input, always = self._mlp()
            if not torch.equal(shared_input, given):
                raise Refusal(shared.inputs.modules[0], f"does not read what {call.name} reads")
            m = m + (always if shared_gate is None else torch.sigmoid(gates[0].output) * always)
        elif shared_gate is not None:
            raise Refusal(shared_gate, "its part in the block is not understood")
        mixture = Mixture(
            *(router, call.name, found.activation, shared, shared_gate, found.gated),
            into=None if into is None else into.name,
            out=None if out is None else out.name,
        )
        return mixture, given, m

    def _apart(
        self, call: ExpertsCall, found: _RoutedExperts, router: Router, logits: Call
    ) -> tuple[Mixture, Tensor, Tensor]:
        """A mixture whose router, experts and shared MLP read norms of the residual stream: (mixture,
        input of the shared MLP, sum of the results)."""
        routing = self._routing_input(logits)
        norm = next((each for each in self.unexplained if torch.equal(each.output, call.input)), None)
        if routing is None or norm is None or norm.kind != "norm":
            raise Refusal(call.name, f"does not read what {logits.name} reads")
        own, input_scale, input_factor = routing
        for each in (own, norm):
            self.unexplained.remove(each)
        shared, given, always = self._mlp()
        first = next((each for each in self.calls if torch.equal(each.output, given)), None)
        if first is None or any(not torch.equal(each.input, first.input) for each in (own, norm)):
            raise Refusal(call.name, "experts, their router and the MLP beside them don't read one stream")
        router = replace(
            router, norm=self.norms[own.name], input_scale=input_scale, input_factor=input_factor
        )
        m, post_norm = self._post_norm(call.output)
        always, shared_post_norm = self._post_norm(always)
        if (post_norm is None) != (shared_post_norm is None):
            raise Refusal(call.name, "a norm behind the experts or the MLP beside them, not behind both")
        mixture = Mixture(
            *(router, call.name, found.activation, shared),
            gated=found.gated,
            norm=self.norms[norm.name],
            post_norm=post_norm,
            shared_post_norm=shared_post_norm,
        )
        return mixture, given, m + always

    def _routing_input(self, logits: Call) -> tuple[Call, str | None, float] | None:
        """(norm, parameter that multiplies its result, factor) that make what the router reads."""
        names = [None, *(name for name in self.corrections if name.startswith(f"{self.name}."))]
        for call, name in product(self.unexplained, names):
            if call.kind != "norm" or call.output.shape != logits.input.shape:
                continue
            values = None if name is None else self.corrections[name]
            if values is not None and values.numel() != logits.input.shape[-1]:
                continue
            scale = factor(logits.input, call.output if values is None else call.output * values)
            if scale is not None:
                return call, name, scale
        return None

    def _router(self, routed: ExpertsCall, found: _RoutedExperts) -> tuple[Router, Call]:
        """(router of the experts' numbers and weights, call that made its logits).

        Some explanations hold by chance in one recording, above all where a token has one expert. Of those
        that hold in every recording, the one with most of the router's parameters is right."""
        own = [name for name, values in self.corrections.items() if values.numel() == found.count]
        vectors = [name for name in own if name.startswith(f"{self.name}.") and name != found.correction]
        explained = list(self._routers(routed, found, vectors))
        known = self.routers.get(routed.name)
        if known is not None:
            explained = [each for each in explained if each[0] in known]
        self.routers[routed.name] = {router for router, _ in explained}
        if not explained:
            raise Refusal(
                routed.name, "its numbers and weights are no top-k of a softmax or sigmoid of known logits"
            )
        used = [len({router.correction, router.expert_scale} - {None}) for router, _ in explained]
        return explained[used.index(max(used))]

    def _routers(
        self, routed: ExpertsCall, found: _RoutedExperts, vectors: Sequence[str]
    ) -> Iterator[tuple[Router, Call]]:
        """Every explanation of the experts' numbers and weights; ``vectors`` are parameters with a number for
        each expert."""
        count, top = found.count, routed.index.shape[-1]
        corrections = [*([] if found.correction is None else [found.correction]), *vectors, None]
        for call in self.unexplained:
            if call.kind != "linear" or call.output.shape[-1] != count:
                continue
            logits = call.output.reshape(-1, count).float()
            if logits.shape[0] != routed.index.shape[0]:
                continue
            scored = (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid()))
            ways = (*product(corrections, (False,)), *((each, True) for each in corrections if each))
            for (scoring, scores), (correction, of_logits) in product(scored, ways):
                decisive, groups = scores, self.groups if found.correction is None else None
                if correction is not None:
                    added = self.corrections[correction]
                    decisive = (logits if of_logits else scores) + added
                    groups = None if of_logits else self.groups
                if not chosen_by(decisive if groups is None else groups.limited(decisive), routed.index):
                    continue
                taken = scores.gather(1, routed.index)
                scales = [None, *(name for name in vectors if name != correction)]
                for normalised, expert_scale in product((True, False), scales):
                    share = taken / taken.sum(-1, keepdim=True) if normalised else taken
                    if expert_scale is not None:
                        share = share * self.corrections[expert_scale][routed.index]
                    scale = factor(routed.weights.float(), share)
                    if scale is None:
                        continue
                    # Some models add up to 1e-6 to the sum that they divide by.
                    short = float(f"{scale:.3g}")
                    scale = short if abs(short - scale) <= TOLERANCE * scale else scale
                    kind: Literal["softmax", "sigmoid"] = "softmax" if scoring == "softmax" else "sigmoid"
                    router = Router(
                        *(call.name, count, top, kind, normalised, scale, correction, groups, call.wide),
                        bias=call.bias,
                        expert_scale=expert_scale,
                        corrects_logits=of_logits,
                    )
                    yield router, call

    def _mlp(self) -> tuple[MLP, Tensor, Tensor]:
        """(MLP, its input, its output)."""
        linears = [call for call in self.unexplained if call.kind == "linear"]
        if not 2 <= len(linears) <= 3:
            part = linears[3].name if len(linears) > 3 else self.name
            raise Refusal(part, f"expected an MLP of two or three linears, found {len(linears)}")
        *inputs, down = linears
        for call in inputs:
            if not torch.equal(call.input, inputs[0].input):
                raise Refusal(call.name, f"does not read what {inputs[0].name} reads")
        for call in linears:
            self.unexplained.remove(call)
        width = down.input.shape[-1]
        outputs = [call.output for call in inputs]
        names = [call.name for call in inputs]
        candidates: list[tuple[list[str], list[Tensor]]]
        if len(inputs) == 2:
            candidates = [(names, outputs), (names[::-1], outputs[::-1])]
        elif outputs[0].shape[-1] == 2 * width:
            candidates = [(names, list(torch.split(outputs[0], width, -1)))]
        else:
            candidates = [(names, outputs)]
        scales = (1.0, *_numbers(self.model.config.get_text_config().to_dict()))
        for scale, (activation, function), (modules, parts) in product(
            scales, ACTIVATIONS.items(), candidates
        ):
            activated = function(scale * parts[0])
            if len(parts) == 2:
                activated = activated * parts[1]
            if activated.shape == down.input.shape and close(down.input, activated):
                slices = Slices(tuple(modules), (width,) * len(parts))
                mlp = MLP(slices, len(parts) == 2, down.name, activation, scale)
                return mlp, inputs[0].input, down.output
        raise Refusal(down.name, f"reads no known activation of {' and '.join(names)}")
