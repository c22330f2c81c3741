"""Recognises the routed MLP of a recorded block: router, experts, and what runs beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from marlinq.models.anatomy import Mixture, Router
from marlinq.models.formulas import TOLERANCE, factor
from marlinq.models.recognise_experts import RoutedExperts
from marlinq.models.recognise_groups import chosen_by
from marlinq.models.recognise_mlp import read_mlp
from marlinq.models.recorded_block import RecordedBlock
from marlinq.models.recording import Call, ExpertsCall, Refusal


def read_mixture(block: RecordedBlock, routed: Sequence[ExpertsCall]) -> tuple[Mixture, Tensor, Tensor]:
    """The routed MLP of ``block``: (mixture, its input, its output).

    Args:
        block: recorded block whose attention is explained.
        routed: its calls of experts, one at least.

    Raises:
        Refusal: a part of it is not understood.
    """
    if len(routed) != 1:
        raise Refusal(routed[1].name, "experts run twice in a block")
    call = routed[0]
    block.explain(call)
    found = block.known.experts[call.name]
    router, logits = _router(block, call, found)
    block.explain(logits)
    # A linear to fewer channels may stand before the experts, and one back behind them.
    linears = block.linears()
    into = next((each for each in linears if torch.equal(each.output, call.input)), None)
    out = next((each for each in linears if torch.equal(each.input, call.output)), None)
    block.explain(*(each for each in (into, out) if each is not None))
    given = call.input if into is None else into.input
    if not torch.equal(logits.input, given):
        return _apart(block, call, found, router, logits)
    m, shared, shared_gate = call.output if out is None else out.output, None, None
    gates = [each for each in block.linears() if each.output.shape[-1] == 1]
    for gate in gates[:1]:
        block.explain(gate)
        if not torch.equal(gate.input, given):
            raise Refusal(gate.name, f"does not read what {call.name} reads")
        shared_gate = gate.name
    if block.linears():
        shared, shared_input, always = read_mlp(block)
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
    block: RecordedBlock, call: ExpertsCall, found: RoutedExperts, router: Router, logits: Call
) -> tuple[Mixture, Tensor, Tensor]:
    """A mixture whose router, experts and shared MLP read norms of the residual stream: (mixture,
    input of the shared MLP, sum of the results)."""
    routing = _routing_input(block, logits)
    norm = next((each for each in block.unexplained if torch.equal(each.output, call.input)), None)
    if routing is None or norm is None or norm.kind != "norm":
        raise Refusal(call.name, f"does not read what {logits.name} reads")
    own, input_scale, input_factor = routing
    block.explain(own, norm)
    shared, given, always = read_mlp(block)
    first = next((each for each in block.calls if torch.equal(each.output, given)), None)
    if first is None or any(not torch.equal(each.input, first.input) for each in (own, norm)):
        raise Refusal(call.name, "experts, their router and the MLP beside them don't read one stream")
    router = replace(
        router, norm=block.known.norms[own.name], input_scale=input_scale, input_factor=input_factor
    )
    m, post_norm = block.post_norm(call.output)
    always, shared_post_norm = block.post_norm(always)
    if (post_norm is None) != (shared_post_norm is None):
        raise Refusal(call.name, "a norm behind the experts or the MLP beside them, not behind both")
    mixture = Mixture(
        *(router, call.name, found.activation, shared),
        gated=found.gated,
        norm=block.known.norms[norm.name],
        post_norm=post_norm,
        shared_post_norm=shared_post_norm,
    )
    return mixture, given, m + always


def _routing_input(block: RecordedBlock, logits: Call) -> tuple[Call, str | None, float] | None:
    """(norm, parameter that multiplies its result, factor) that make what the router reads."""
    names = [None, *(name for name in block.corrections if name.startswith(f"{block.name}."))]
    for call, name in product(block.unexplained, names):
        if call.kind != "norm" or call.output.shape != logits.input.shape:
            continue
        values = None if name is None else block.corrections[name]
        if values is not None and values.numel() != logits.input.shape[-1]:
            continue
        scale = factor(logits.input, call.output if values is None else call.output * values)
        if scale is not None:
            return call, name, scale
    return None


def _router(block: RecordedBlock, routed: ExpertsCall, found: RoutedExperts) -> tuple[Router, Call]:
    """(router of the experts' numbers and weights, call that made its logits).

    Some explanations hold by chance in one recording, above all where a token has one expert. Of those
    that hold in every recording, the one with most of the router's parameters is right."""
    own = [name for name, values in block.corrections.items() if values.numel() == found.count]
    vectors = [name for name in own if name.startswith(f"{block.name}.") and name != found.correction]
    explained = list(_routers(block, routed, found, vectors))
    known = block.known.routers.get(routed.name)
    if known is not None:
        explained = [each for each in explained if each[0] in known]
    block.known.routers[routed.name] = {router for router, _ in explained}
    if not explained:
        raise Refusal(
            routed.name, "its numbers and weights are no top-k of a softmax or sigmoid of known logits"
        )
    used = [len({router.correction, router.expert_scale} - {None}) for router, _ in explained]
    return explained[used.index(max(used))]


def _routers(
    block: RecordedBlock, routed: ExpertsCall, found: RoutedExperts, vectors: Sequence[str]
) -> Iterator[tuple[Router, Call]]:
    """Every explanation of the experts' numbers and weights; ``vectors`` are parameters with a number for
    each expert."""
    count, top = found.count, routed.index.shape[-1]
    corrections = [*([] if found.correction is None else [found.correction]), *vectors, None]
    for call in block.unexplained:
        if call.kind != "linear" or call.output.shape[-1] != count:
            continue
        logits = call.output.reshape(-1, count).float()
        if logits.shape[0] != routed.index.shape[0]:
            continue
        scored = (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid()))
        ways = (*product(corrections, (False,)), *((each, True) for each in corrections if each))
        for (scoring, scores), (correction, of_logits) in product(scored, ways):
            decisive, groups = scores, block.known.groups if found.correction is None else None
            if correction is not None:
                added = block.corrections[correction]
                decisive = (logits if of_logits else scores) + added
                groups = None if of_logits else block.known.groups
            if not chosen_by(decisive if groups is None else groups.limited(decisive), routed.index):
                continue
            taken = scores.gather(1, routed.index)
            scales = [None, *(name for name in vectors if name != correction)]
            for normalised, expert_scale in product((True, False), scales):
                share = taken / taken.sum(-1, keepdim=True) if normalised else taken
                if expert_scale is not None:
                    share = share * block.corrections[expert_scale][routed.index]
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
