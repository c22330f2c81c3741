"""Recognises a decoder's computation from its behaviour, not from names.

A model without weights runs once on a few tokens, with linears, norms, embeddings and attention replaced by
stubs that return random numbers (:mod:`marlinq.models.recording`). Each input of a part is then explained by
earlier outputs: equal, scaled, rotated, activated, added. An input without explanation, or a parameter
without known use, ends recognition with the part and the reason.

Its modules, in the order of :func:`recognise`: ``recognise_norms``, ``recognise_experts`` and
``recognise_mixers`` try single modules on random numbers; ``recognise_ends`` reads what stands before and
behind the blocks; ``recognise_block`` reads a block, with ``recognise_attention``, ``recognise_latent``,
``recognise_mlp`` and ``recognise_mixture`` for its parts.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from marlinq.core.errors import UnsupportedError
from marlinq.models.anatomy import Anatomy, Attention, LatentAttention, Mixture, Norm, Unrecognised
from marlinq.models.blueprint import decoder_blocks
from marlinq.models.building import parameters_on_meta
from marlinq.models.linears import is_linear
from marlinq.models.recognise_attention import FORWARD_ERRORS, RotaryModules
from marlinq.models.recognise_block import read_layer
from marlinq.models.recognise_ends import Entry, outside_blocks, read_exit
from marlinq.models.recognise_experts import RoutedExperts, find_routed, routing_vectors
from marlinq.models.recognise_groups import find_groups
from marlinq.models.recognise_mixers import Mixer, find_mixers
from marlinq.models.recognise_norms import find_norms
from marlinq.models.recorded_block import KnownParts, RecordedBlock
from marlinq.models.recording import TOKENS, Recording, Refusal, record

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
        norms = find_norms(model)
        experts: dict[str, RoutedExperts] = {}
        mixers: dict[str, Mixer] = {}
        vectors: dict[str, tuple[int, ...]] = {}
        routing: dict[str, tuple[int, ...]] = {}
        config = model.config.get_text_config()
        heads, hidden = (getattr(config, key, None) for key in ("num_attention_heads", "hidden_size"))
        for name, block in zip(names, blocks, strict=True):
            experts |= find_routed(name, block)
            mixers |= find_mixers(name, block)
            routing |= routing_vectors(name, block, experts, norms, hidden)
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
            known = KnownParts(model, tuple(names), norms, rotary, experts, mixers, groups, routers={})
            distant = None if far is None else recorded(far)
            if experts:
                # Afterwards every choice of a router explains all recordings.
                for recording in (*recordings, *([] if distant is None else [distant])):
                    _anatomy(known, recording)
            anatomy = _anatomy(known, recordings[0])
            if distant is not None and anatomy != _anatomy(known, distant):
                reason = f"its forward pass is another one at position {far} than at 0"
                raise Refusal(type(model).__name__, reason)
            if any(anatomy != _anatomy(known, recording) for recording in recordings[1:]):
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


def _check_parameters(
    name: str,
    block: nn.Module,
    norms: dict[str, Norm],
    experts: dict[str, RoutedExperts],
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


def _anatomy(known: KnownParts, recording: Recording) -> Anatomy:
    """The anatomy from one recording."""
    called = {call.name: call.input.shape[-1] for call in recording.calls if call.kind == "norm"}
    norms = {name: replace(known.norms[name], width=width) for name, width in called.items()}
    known = replace(known, norms=norms)
    model, names = known.model, known.blocks
    if len(recording.outputs) != len(names):
        raise Refusal(names[len(recording.outputs)], "does not run in a forward pass")
    before, after = outside_blocks(recording.calls)
    entry = Entry(before, recording, norms)
    layers = []
    for index, name in enumerate(names):
        if index and not torch.equal(recording.inputs[index], recording.outputs[index - 1]):
            raise Refusal(name, "does not get the hidden states of the block before it as they are")
        block = RecordedBlock(known, recording, index, takes_vectors=entry.layer_inputs is not None)
        layers.append(read_layer(block, recording.positions))
    for layer in layers:
        if isinstance(layer.attention, LatentAttention):
            expansion = layer.attention.expansion
            if getattr(model.get_submodule(expansion), "bias", None) is not None:
                raise Refusal(expansion, "has a bias, which the queries of latent attention can't absorb")
    final_norm, head, scale, softcap = read_exit(model, after, recording, norms)
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
