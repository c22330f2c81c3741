"""Recognises gated delta nets by running modules on random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.models.convolution import convolve
from marlinq.models.delta_net import DeltaNet, delta_rule, heads_of
from marlinq.models.formulas import close
from marlinq.models.linears import is_linear
from marlinq.models.mixer_runs import Source, floats_of, run_mixer
from marlinq.models.parts import Norm, Slices

_BETA_SCALES = (1.0, 2.0)
"""factors of beta: up to 1, S shrinks along a key; up to 2, it may change its sign"""


def prove_delta_net(module: nn.Module) -> DeltaNet | None:
    """The delta net that ``module`` computes, with names relative to it; None if it computes another one."""
    children = dict(module.named_children())
    convolutions = [name for name, child in children.items() if isinstance(child, nn.Conv1d)]
    linears = [name for name, child in children.items() if is_linear(child)]
    norms = [name for name in children if name not in convolutions and name not in linears]
    vectors = {name: value.shape for name, value in module.named_parameters(recurse=False)}
    if len(convolutions) != 1 or len(norms) != 1 or len(vectors) != 2 or len(set(vectors.values())) != 1:
        return None
    convolution, normalised = children[convolutions[0]], children[norms[0]]
    weights = [value.shape for value in normalised.parameters()]
    heads = next(iter(vectors.values()))
    if len(weights) != 1 or len(weights[0]) != 1 or len(heads) != 1:
        return None
    assert isinstance(convolution, nn.Conv1d)
    channels, taps = convolution.out_channels, convolution.kernel_size[0]
    if convolution.groups != channels or convolution.in_channels != channels or convolution.bias is not None:
        return None
    recorded = run_mixer(module, linears)
    if recorded is None or len(recorded.calls) < 2:
        return None
    probe, x, calls = recorded.probe, recorded.x, recorded.calls
    if any(not torch.equal(call.given, x) for call in calls[:-1]):
        return None
    held = dict(probe.named_parameters())
    values, size = heads[0] * weights[0][0], weights[0][0]
    if (channels - values) % 2 or channels <= values:
        return None
    result = calls[-1].given
    for candidate, eps, beta_scale in product(
        _candidates(calls, heads[0], size, channels, tuple(vectors)), floats_of(normalised), _BETA_SCALES
    ):
        net = replace(
            candidate,
            convolution=convolutions[0],
            taps=taps,
            norm=Norm(norms[0], "rms", eps, width=size),
            output=calls[-1].name,
            beta_scale=beta_scale,
        )
        if close(result, _computed(net, calls, held, norms[0])):
            return net
    return None


def _candidates(
    calls: list[Source], heads: int, size: int, channels: int, vectors: tuple[str, ...]
) -> Iterator[DeltaNet]:
    """Every possible assignment of the projections' columns to the net's inputs; other fields are empty."""
    values = heads * size
    keys = (channels - values) // 2
    small = [call for call in calls[:-1] if call.width in (heads, 2 * heads)]
    large = [call for call in calls[:-1] if call not in small]
    for key_heads in (count for count in range(1, heads + 1) if heads % count == 0 and keys % count == 0):
        for turns in sorted({1, key_heads}):
            for wide, narrow, (decay, bias) in product(
                permutations(large), permutations(small), permutations(vectors)
            ):
                inputs = Slices(tuple(call.name for call in wide), (keys, keys, values, values), turns)
                rates = Slices(tuple(call.name for call in narrow), (heads, heads), turns)
                if sum(call.width for call in wide) != sum(inputs.widths):
                    continue
                if sum(call.width for call in narrow) != sum(rates.widths):
                    continue
                empty = Norm("", "rms", 0.0)
                yield DeltaNet(
                    *(inputs, rates, "", 0, decay, bias, empty, "", key_heads, heads),
                    *(keys // key_heads, size),
                )


def _computed(net: DeltaNet, calls: list[Source], held: Mapping[str, Tensor], norm: str) -> Tensor:
    """The input of the output projection as ``net`` predicts it: [1, T, value channels]."""
    outputs = {call.name: call.output for call in calls}

    def split(slices: Slices) -> list[Tensor]:
        return slices.split(torch.cat([outputs[name] for name in slices.modules], -1))

    q, k, v, gate = split(net.inputs)
    beta, step = split(net.rates)
    weight = held[f"{net.convolution}.weight"][:, 0]
    joined = torch.cat((q, k, v), -1)
    convolved = F.silu(convolve(joined, joined.new_zeros(1, net.taps - 1, joined.shape[-1]), weight))
    heads = heads_of(net, convolved, beta, step, held[net.decay], held[net.step_bias])
    mixed = delta_rule(heads, torch.zeros(1, net.value_heads, net.key_dim, net.value_dim))
    normed = F.rms_norm(mixed, (net.value_dim,), held[f"{norm}.weight"], net.norm.eps)
    return (normed * F.silu(gate.reshape(mixed.shape))).flatten(-2)
