"""Recognises Mamba-2 mixers by running modules on random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.models.convolution import convolve
from marlinq.models.formulas import close, factor
from marlinq.models.linears import is_linear
from marlinq.models.mamba import Mamba, Scales, gated, scan, tokens_of
from marlinq.models.mixer_runs import MixerRun, floats_of, run_mixer
from marlinq.models.parts import Norm, Slices

# Numbers added to the steps in further runs, so that nearly all steps are below usual lower bounds or above
# upper ones.
_SHIFTS = (-9.0, 9.0)


def prove_mamba(module: nn.Module) -> Mamba | None:
    """The Mamba-2 mixer that ``module`` computes, with names relative to it; None if it computes another
    function."""
    children = dict(module.named_children())
    convolutions = [name for name, child in children.items() if isinstance(child, nn.Conv1d)]
    linears = [name for name, child in children.items() if is_linear(child)]
    others = [
        name
        for name, child in children.items()
        if name not in convolutions and name not in linears and any(True for _ in child.parameters())
    ]
    vectors = {name: value.shape for name, value in module.named_parameters(recurse=False)}
    if (len(convolutions), len(linears), len(vectors)) != (1, 2, 3) or len(others) > 1:
        return None
    heads = next(iter(vectors.values()))
    if len(heads) != 1 or len(set(vectors.values())) != 1:
        return None
    first = run_mixer(module, linears)
    if first is None or len(first.calls) != 2:
        return None
    start = _start(module, first, convolutions[0], heads[0])
    entered = factor(first.calls[0].given, first.x)
    if start is None or entered is None:
        return None
    if entered != 1 and getattr(module.get_submodule(first.calls[0].name), "bias", None) is not None:
        return None
    shifted = [run_mixer(module, linears, (shift, heads[0])) for shift in _SHIFTS]
    norms = _norms(children[others[0]], others[0], start) if others else [(None, False)]
    limits = [*_limits(module), (0.0, None)]
    counts = [
        groups
        for groups in range(1, start.heads + 1)
        if start.heads % groups == 0 and start.state_dim % groups == 0
    ]
    for (least, most), (bias, decay, skip), groups in product(limits, permutations(vectors), counts):
        candidate = replace(
            start,
            step_bias=bias,
            decay=decay,
            skip=skip,
            groups=groups,
            state_dim=start.state_dim // groups,
            least_step=least,
            most_step=most,
        )
        mixed = _mixed(candidate, first)
        for norm, norm_first in norms:
            if norm is not None and norm.width == 0:
                norm = replace(norm, width=candidate.width // groups)
            whole = replace(candidate, norm=norm, norm_first=norm_first)
            if _explains(whole, mixed, first) and all(
                run is not None and _explains(whole, _mixed(whole, run), run) for run in shifted
            ):
                return replace(whole, scales=whole.scales.times(entered))
    return None


def _explains(mixer: Mamba, mixed: Tensor, run: MixerRun) -> bool:
    """Whether ``mixer``, whose recurrence gives ``mixed``, computes what the output projection reads."""
    return close(run.calls[-1].given, _computed(mixer, mixed, run))


def _start(module: nn.Module, run: MixerRun, convolution: str, heads: int) -> Mamba | None:
    """The mixer as sizes and buffers determine it; ``state_dim`` still counts the keys of all groups."""
    entry, last = run.calls
    width = last.given.shape[-1]
    convolved = module.get_submodule(convolution)
    assert isinstance(convolved, nn.Conv1d)
    channels = convolved.out_channels
    if convolved.groups != channels or convolved.in_channels != channels:
        return None
    keys = (channels - width) // 2
    if keys <= 0 or (channels - width) % 2 or width % heads or entry.width != width + channels + heads:
        return None
    widths = (width, width, keys, keys, heads)
    scales = _scales(module, widths)
    if scales is None:
        return None
    inputs = Slices((entry.name,), widths)
    taps = convolved.kernel_size[0]
    sizes = heads, width // heads, 1, keys
    return Mamba(
        *(inputs, convolution, taps, "", "", "", None, False, last.name),
        *sizes,
        scales=scales,
    )


def _scales(module: nn.Module, widths: tuple[int, ...]) -> Scales | None:
    """Factors on the columns of the input projection, from a buffer that is as wide; None if its values
    differ within a part."""
    factors = [1.0] * len(widths)
    for buffer in module.buffers():
        if buffer.numel() == sum(widths):
            parts = torch.split(buffer.flatten(), list(widths))
            if any(bool((part != part[0]).any()) for part in parts):
                return None
            factors = [float(part[0]) for part in parts]
    return Scales(*factors)


def _norms(module: nn.Module, name: str, mixer: Mamba) -> list[tuple[Norm | None, bool]]:
    """Norms that ``module`` may be, over all channels or a group's, before and behind the gate. A width of 0
    stands for a group's."""
    shapes = [tuple(value.shape) for value in module.parameters()]
    if shapes != [(mixer.width,)]:
        return []
    return [
        (Norm(name, "rms", eps, narrow_first=False, width=width), first)
        for eps, width, first in product(floats_of(module), (0, mixer.width), (False, True))
    ]


def _limits(module: nn.Module) -> Iterator[tuple[float, float | None]]:
    """Bounds of a step: all attributes that are two numbers."""
    for value in vars(module).values():
        if isinstance(value, (tuple, list)) and len(value) == 2:
            least, most = value
            if isinstance(least, (int, float)) and isinstance(most, (int, float)) and least <= most:
                yield float(least), None if math.isinf(most) else float(most)


def _split(mixer: Mamba, run: MixerRun) -> tuple[Tensor, Tensor, Tensor]:
    """(gates, inputs of the convolution, steps)."""
    gate, value, key, query, step = mixer.inputs.split(run.calls[0].output)
    scales = mixer.scales
    return gate, torch.cat((value * scales.value, key * scales.key, query * scales.query), -1), step


def _mixed(mixer: Mamba, run: MixerRun) -> Tensor:
    """The result of the recurrence, before norm and gate."""
    held: Mapping[str, Tensor] = dict(run.probe.named_parameters())
    _, joined, step = _split(mixer, run)
    weight, bias = held[f"{mixer.convolution}.weight"][:, 0], held.get(f"{mixer.convolution}.bias")
    before = joined.new_zeros(1, mixer.taps - 1, joined.shape[-1])
    convolved = F.silu(convolve(joined, before, weight, bias))
    tokens = tokens_of(mixer, convolved, step, held[mixer.step_bias])
    state = torch.zeros(1, mixer.heads, mixer.state_dim, mixer.head_dim)
    return scan(tokens, -held[mixer.decay].exp(), held[mixer.skip], state)


def _computed(mixer: Mamba, mixed: Tensor, run: MixerRun) -> Tensor:
    """The input of the output projection as ``mixer`` predicts it: [1, T, width]."""
    weight = (
        None if mixer.norm is None else run.probe.get_submodule(mixer.norm.module).get_parameter("weight")
    )
    return gated(mixer, mixed, _split(mixer, run)[0], weight)
