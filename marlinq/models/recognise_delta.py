"""Recognises gated delta nets in a decoder block by running modules on random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.models.delta_net import DeltaNet, convolve, delta_rule, heads_of
from marlinq.models.formulas import close
from marlinq.models.linears import is_linear, linear_shape
from marlinq.models.parts import Norm, Slices

_TOKENS = 5
_SEED = 5_501
# Exceptions of modules that take other arguments, or need a missing package.
_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, ImportError)

# (class, shapes) -> delta net with names relative to the module; None for other modules.
_proved: dict[tuple[object, ...], DeltaNet | None] = {}


def find_delta_nets(name: str, block: nn.Module) -> dict[str, DeltaNet]:
    """Full name -> delta net, for each module in ``block`` that computes a gated delta net."""
    found: dict[str, DeltaNet] = {}
    for inner, module in block.named_modules():
        if not inner or not any(isinstance(child, nn.Conv1d) for child in module.children()):
            continue
        key = (
            type(module),
            *((at, tuple(value.shape)) for at, value in module.named_parameters()),
            *_plain(module),
        )
        if key not in _proved:
            _proved[key] = _prove(module)
        net = _proved[key]
        if net is not None:
            found[f"{name}.{inner}"] = _within(net, f"{name}.{inner}")
    return found


def _plain(module: nn.Module) -> Iterator[tuple[str, str, object]]:
    """(module, attribute, value) of all numbers and texts in ``module`` and its submodules."""
    for inner, each in module.named_modules():
        for key, value in vars(each).items():
            if isinstance(value, (int, float, str)) and key != "layer_idx":
                yield inner, key, value


def _within(net: DeltaNet, name: str) -> DeltaNet:
    def full(slices: Slices) -> Slices:
        return replace(slices, modules=tuple(f"{name}.{each}" for each in slices.modules))

    return replace(
        net,
        inputs=full(net.inputs),
        rates=full(net.rates),
        convolution=f"{name}.{net.convolution}",
        decay=f"{name}.{net.decay}",
        step_bias=f"{name}.{net.step_bias}",
        norm=replace(net.norm, module=f"{name}.{net.norm.module}"),
        output=f"{name}.{net.output}",
    )


class _Source(nn.Module):
    """Stub in the place of a linear: returns random numbers and stores its input."""

    def __init__(self, name: str, width: int, calls: list[_Source]) -> None:
        super().__init__()
        self.name, self.width, self.calls = name, width, calls
        self.given = self.output = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        self.given = x
        self.output = torch.randn(*x.shape[:-1], self.width)
        self.calls.append(self)
        return self.output.clone()


def _prove(module: nn.Module) -> DeltaNet | None:
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
    hidden = linear_shape(children[linears[0]])[0] if linears else 0
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(_SEED)
        calls: list[_Source] = []
        sources = {name: _Source(name, linear_shape(children[name])[1], calls) for name in linears}
        probe = _materialised(module, sources)
        x = torch.randn(1, _TOKENS, hidden)
        try:
            probe(hidden_states=x)
        except _ERRORS:
            return None
    if len(calls) < 2 or any(not torch.equal(call.given, x) for call in calls[:-1]):
        return None
    held = dict(probe.named_parameters())
    values, size = heads[0] * weights[0][0], weights[0][0]
    if (channels - values) % 2 or channels <= values:
        return None
    result = calls[-1].given
    for candidate, eps in product(
        _candidates(calls, heads[0], size, channels, tuple(vectors)), _floats(normalised)
    ):
        net = replace(
            candidate,
            convolution=convolutions[0],
            taps=taps,
            norm=Norm(norms[0], "rms", eps, width=size),
            output=calls[-1].name,
        )
        if close(result, _computed(net, calls, held, norms[0])):
            return net
    return None


def _materialised(module: nn.Module, sources: dict[str, _Source]) -> nn.Module:
    """A float32 copy of ``module`` with stubs for its linears and random values for other parameters."""
    # deepcopy takes the stubs for the linears, whose weights are not copied.
    memo: dict[int, Any] = {id(module.get_submodule(name)): source for name, source in sources.items()}
    probe = deepcopy(module, memo)
    for name, source in sources.items():
        setattr(probe, name, source)
    for each in probe.modules():
        for key, value in list(each.named_parameters(recurse=False)):
            setattr(each, key, nn.Parameter(torch.rand(value.shape) * 2 - 0.5, requires_grad=False))
    return probe.eval()


def _floats(module: nn.Module) -> list[float]:
    return sorted({value for value in vars(module).values() if isinstance(value, float)})


def _candidates(
    calls: list[_Source], heads: int, size: int, channels: int, vectors: tuple[str, ...]
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


def _computed(net: DeltaNet, calls: list[_Source], held: Mapping[str, Tensor], norm: str) -> Tensor:
    """The input of the output projection as ``net`` predicts it: [1, T, value channels]."""
    outputs = {call.name: call.output for call in calls}

    def split(slices: Slices) -> list[Tensor]:
        return slices.split(torch.cat([outputs[name] for name in slices.modules], -1))

    q, k, v, gate = split(net.inputs)
    beta, step = split(net.rates)
    weight = held[f"{net.convolution}.weight"][:, 0]
    joined = torch.cat((q, k, v), -1)
    convolved = convolve(joined, joined.new_zeros(1, net.taps - 1, joined.shape[-1]), weight)
    heads = heads_of(net, convolved, beta, step, held[net.decay], held[net.step_bias])
    mixed = delta_rule(heads, torch.zeros(1, net.value_heads, net.key_dim, net.value_dim))
    normed = F.rms_norm(mixed, (net.value_dim,), held[f"{norm}.weight"], net.norm.eps)
    return (normed * F.silu(gate.reshape(mixed.shape))).flatten(-2)
