"""Recognises gated delta nets with decays by channel by running modules on random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.models.convolution import convolve
from marlinq.models.delta_net import ChannelRates, DeltaNet, delta_rule, heads_of
from marlinq.models.formulas import close
from marlinq.models.linears import is_linear
from marlinq.models.mixer_runs import MixerRun, Source, floats_of, run_mixer
from marlinq.models.parts import Norm, Slices


def prove_channel_delta_net(module: nn.Module) -> DeltaNet | None:
    """The delta net with decays by channel that ``module`` computes, with names relative to it; None if it
    computes another one."""
    convolutions = [name for name, child in module.named_children() if isinstance(child, nn.Conv1d)]
    linears = [name for name, inner in module.named_modules() if is_linear(inner)]
    if len(convolutions) != 1 or len(linears) < 6:
        return None
    convolution = module.get_submodule(convolutions[0])
    assert isinstance(convolution, nn.Conv1d)
    channels, taps = convolution.out_channels, convolution.kernel_size[0]
    if convolution.groups != channels or convolution.in_channels != channels or convolution.bias is not None:
        return None
    left = {
        name: value
        for name, value in module.named_parameters()
        if name.rpartition(".")[0] not in (*convolutions, *linears)
    }
    norms = [name for name, value in left.items() if name.count(".") == 1 and value.dim() == 1]
    for weight in norms:
        vectors = sorted((left[name].numel(), name) for name in left if name != weight)
        if len(vectors) != 2:
            continue
        (heads, decay), (steps, step_bias) = vectors
        value_dim, norm = left[weight].numel(), weight.rpartition(".")[0]
        if steps % heads or channels != 2 * steps + heads * value_dim:
            continue
        recorded = run_mixer(module, linears)
        if recorded is None or len(recorded.calls) != len(linears):
            continue
        net = DeltaNet(
            inputs=Slices((), ()),
            rates=Slices((), ()),
            convolution=convolutions[0],
            taps=taps,
            decay=decay,
            step_bias=step_bias,
            norm=Norm(norm, "rms", 0.0, narrow_first=False, width=value_dim),
            output=recorded.calls[-1].name,
            key_heads=heads,
            value_heads=heads,
            key_dim=steps // heads,
            value_dim=value_dim,
        )
        for eps, candidate in product(floats_of(module.get_submodule(norm)), _candidates(net, recorded)):
            found = replace(candidate, norm=replace(net.norm, eps=eps))
            if close(recorded.calls[-1].given, _computed(found, recorded, f"{norm}.weight")):
                return found
    return None


def _candidates(net: DeltaNet, recorded: MixerRun) -> Iterator[DeltaNet]:
    """Every possible part of the projections in ``net``."""
    calls = recorded.calls[:-1]
    first = [call for call in calls if torch.equal(call.given, recorded.x)]
    behind = {
        call.name: before
        for call in calls
        for before in first
        if call not in first and torch.equal(call.given, before.output)
    }
    second = [call for call in calls if call.name in behind]
    if len(second) != 2 or len(first) + 2 != len(calls):
        return
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    for (steps, gates), (q, k, v, beta) in product(
        permutations(second), permutations([call for call in first if call not in behind.values()], 4)
    ):
        read = behind[steps.name], behind[gates.name]
        sizes = (q.width, k.width, v.width, beta.width, steps.width, gates.width)
        if sizes != (keys, keys, values, net.value_heads, keys, values) or read[0] is read[1]:
            continue
        inputs = (q, k, v, *read)
        yield replace(
            net,
            inputs=Slices(tuple(each.name for each in inputs), tuple(each.width for each in inputs)),
            rates=Slices((beta.name,), (beta.width,)),
            channels=ChannelRates(steps.name, gates.name),
        )


def _computed(net: DeltaNet, recorded: MixerRun, weight: str) -> Tensor:
    """The input of the output projection as ``net`` predicts it: [1, T, value channels]."""
    calls: dict[str, Source] = {call.name: call for call in recorded.calls}
    held = dict(recorded.probe.named_parameters())
    assert net.channels is not None
    joined = torch.cat([calls[name].output for name in net.inputs.modules[:3]], -1)
    taps = held[f"{net.convolution}.weight"][:, 0]
    convolved = F.silu(convolve(joined, joined.new_zeros(1, net.taps - 1, joined.shape[-1]), taps))
    beta, step = calls[net.rates.modules[0]].output, calls[net.channels.steps].output
    heads = heads_of(net, convolved, beta, step, held[net.decay].flatten(), held[net.step_bias].flatten())
    mixed = delta_rule(heads, torch.zeros(1, net.value_heads, net.key_dim, net.value_dim))
    normed = F.rms_norm(mixed, (net.value_dim,), held[weight], net.norm.eps)
    return (normed * calls[net.channels.gates].output.reshape(mixed.shape).sigmoid()).flatten(-2)
