"""Recognises a recorded decoder block: attention or a mixer, MLP, and how both join the residual stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Generic, TypeVar

import torch
from torch import Tensor

from marlinq.models.anatomy import (
    MLP,
    Attention,
    InputGate,
    LatentAttention,
    Layer,
    Mamba,
    Mixture,
    Norm,
)
from marlinq.models.formulas import ACTIVATIONS, close, factor, tidy
from marlinq.models.recognise_attention import attention_part
from marlinq.models.recognise_latent import find_expansion, latent_part
from marlinq.models.recognise_mixers import Mixer
from marlinq.models.recognise_mixture import read_mixture
from marlinq.models.recognise_mlp import read_mlp
from marlinq.models.recorded_block import RecordedBlock
from marlinq.models.recording import AttentionCall, ExpertsCall, Refusal

T = TypeVar("T")

_Attended = Attention | LatentAttention | Mixer


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


def read_layer(block: RecordedBlock, positions: Tensor) -> Layer:
    """The layer that ``block`` computes.

    Args:
        block: recorded calls, of which none is explained yet.
        positions: int64 [T], positions of the recorded tokens.

    Raises:
        Refusal: a part of it is not understood.
    """
    attended = _attended(block, positions)
    gated = _input_gate(block)
    behind = None if attended is not None and not block.unexplained else _mlp_part(block, attended)
    if block.unexplained:
        raise Refusal(block.unexplained[0].name, "its part in the block is not understood")
    parts = [part for part in (attended, behind, gated) if part is not None]
    for part in parts:
        for name, x in ((part.writer, part.output), (part.reader, part.reads)):
            if x.shape != block.entered.shape:
                raise Refusal(name, f"{list(x.shape)} where the block has {list(block.entered.shape)}")
    both = attended is not None and behind is not None
    parallel = both and all(torch.equal(part.reads, block.entered) for part in parts)
    if gated is not None and parallel:
        raise Refusal(gated.reader, "a gate of the layer's own inputs in a parallel block")
    beside = None if attended is None else attended.beside
    beside_scale = 1.0
    if parallel:
        if beside is not None:
            raise Refusal(beside.anatomy.output, "a mixer beside attention in a parallel block")
        total = sum((part.output for part in parts), torch.zeros_like(block.entered))
        scales = [_scale(block, block.left - block.entered, total, "sum of attention and MLP")] * 2
    else:
        between = [block.entered, *(part.reads for part in parts[1:]), block.left]
        scales = []
        for part, start, end in zip(parts, between[:-1], between[1:], strict=True):
            added = end - start
            if part is attended and beside is not None:
                beside_scale = _share(added, beside.output, part.output)
                added = added - beside_scale * beside.output
            scales.append(_scale(block, added, part.output, part.what))
        if gated is not None and scales.pop() != 1:
            raise Refusal(gated.writer, "its result is multiplied before it is added")
    return Layer(
        name=block.name,
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
        stream_scale=block.stream_scale,
    )


def _attended(block: RecordedBlock, positions: Tensor) -> _Part[_Attended] | None:
    """Attention or a mixer in its place; None in a block of a single MLP."""
    mixed = [call for call in block.calls if isinstance(call, AttentionCall) or call.kind == "mixer"]
    attending = [call for call in mixed if isinstance(call, AttentionCall)]
    if len(mixed) > 2 or (len(mixed) == 2 and len(attending) != 1):
        raise Refusal(block.name, "computes attention more than once")
    if not mixed:
        linears = [call for call in block.calls if call.kind == "linear"]
        if len(linears) > 3 and not any(isinstance(call, ExpertsCall) for call in block.calls):
            reason = "does not compute attention through transformers' attention interface"
            raise Refusal(block.name, reason)
        return None
    call = (attending or mixed)[0]
    attention: _Attended
    if isinstance(call, AttentionCall):
        place = block.calls.index(call)
        before, after, rotary = (
            block.calls[:place],
            block.calls[place + 1 :],
            block.known.rotary.at(positions),
        )
        expansion = find_expansion(call, before)
        if expansion is None:
            attention, used, given, output = attention_part(
                *(call, before, after, block.known.norms, rotary, block.earlier)
            )
        else:
            attention, used, given, output = latent_part(
                call, expansion, before, after, block.known.norms, rotary
            )
        reader, result = used[0].name, output.output
    else:
        attention, used, given, reader, result = (
            block.known.mixers[call.name],
            [],
            call.input,
            call.name,
            call.output,
        )
    block.explain(call, *used)
    result, post = block.post_norm(result)
    given, input_scale = _unscaled(block, given)
    norm, reads = block.source(given, reader)
    if not block.enters(reads):
        raise Refusal(reader, "attention does not read what enters the block, nor a norm of it")
    if input_scale != 1:
        attention = _of_scaled(block, attention, input_scale)
    part = _Part("attention", attention, reader, attention.output, norm, post, reads, result)
    beside = next((each for each in mixed if each is not call), None)
    if beside is None:
        return replace(part, input_scale=input_scale)
    found = block.known.mixers[beside.name]
    if not isinstance(found, Mamba) or post is not None or not torch.equal(beside.input, given):
        raise Refusal(beside.name, "is no Mamba-2 mixer that reads what attention reads")
    block.explain(beside)
    return replace(part, input_scale=input_scale, beside=_Beside(found, beside.output))


def _unscaled(block: RecordedBlock, x: Tensor) -> tuple[Tensor, float]:
    """(output of a norm of the block, factor) whose product is ``x``; ``x`` and 1 without such a norm."""
    outputs = [call.output for call in block.calls if call.kind == "norm"]
    if not any(torch.equal(output, x) for output in outputs):
        for output in outputs:
            scale = factor(x, output)
            if scale is not None:
                return output, scale
    return x, 1.0


def _of_scaled(
    block: RecordedBlock, attention: Attention | LatentAttention | Mixer, scale: float
) -> Attention:
    """Attention that gives 1 / ``scale`` of what ``attention`` gives for inputs times ``scale``.

    Queries and keys are linear in the input, without biases and norms of heads, and so are values."""
    if not isinstance(attention, Attention) or attention.query_norm or attention.key_norm:
        raise Refusal(attention.output, f"its input is multiplied by {scale:g}")
    for name in attention.qkv.modules:
        if getattr(block.known.model.get_submodule(name), "bias", None) is not None:
            raise Refusal(name, f"has a bias, and its input is multiplied by {scale:g}")
    return replace(attention, scale=tidy(attention.scale * scale**2))


def _mlp_part(block: RecordedBlock, attended: _Part[_Attended] | None) -> _Part[MLP | Mixture]:
    routed = [call for call in block.unexplained if isinstance(call, ExpertsCall)]
    mlp: MLP | Mixture
    mlp, given, result = read_mixture(block, routed) if routed else read_mlp(block)
    reader = mlp.experts if isinstance(mlp, Mixture) else mlp.inputs.modules[0]
    writer = mlp.experts if isinstance(mlp, Mixture) else mlp.down
    result, post = block.post_norm(result)
    norm, reads = block.source(given, reader, shared=None if attended is None else attended.norm)
    if attended is None and not block.enters(reads):
        raise Refusal(reader, "the MLP does not read what enters the block, nor a norm of it")
    return _Part("MLP", mlp, reader, writer, norm, post, reads, result)


def _input_gate(block: RecordedBlock) -> _Part[InputGate] | None:
    """The part that reads the layer's own vector, which the block is called with; None without one."""
    linears = block.linears()
    for vector, gate, writer in product(block.vectors, linears, linears):
        if not gate.output.shape == vector.shape == writer.input.shape:
            continue
        for activation, function in ACTIVATIONS.items():
            if not close(writer.input, function(gate.output) * vector):
                continue
            block.explain(gate, writer)
            result, post = block.post_norm(writer.output)
            found = InputGate(gate.name, activation, writer.name, post)
            what = "gated inputs of the layer"
            return _Part(what, found, gate.name, writer.name, None, post, gate.input, result)
    return None


def _scale(block: RecordedBlock, difference: Tensor, addend: Tensor, what: str) -> float:
    # The tolerance is relative to the sums, whose rounding a difference of them contains.
    wide, narrow = difference.double(), addend.double()
    value = tidy(float((wide * narrow).sum() / (narrow * narrow).sum()))
    size = float(torch.stack((block.entered, block.left, addend)).abs().max())
    if float((wide - value * narrow).abs().max()) > 2e-6 * size or not value:
        raise Refusal(block.name, f"what is added to the residual stream is no multiple of the {what}")
    return value


def _share(total: Tensor, first: Tensor, second: Tensor) -> float:
    """The factor of ``first`` in ``total``, a sum of multiples of ``first`` and ``second``."""
    both = torch.stack((first.flatten(), second.flatten()), 1).double()
    return tidy(float(torch.linalg.lstsq(both, total.flatten().double()[:, None]).solution[0]))
