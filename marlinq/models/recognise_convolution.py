"""Recognises short convolutions between gates by running modules on random numbers."""

from __future__ import annotations

from torch import nn

from marlinq.models.convolution import GatedConvolution, convolve
from marlinq.models.formulas import close
from marlinq.models.linears import is_linear
from marlinq.models.mixer_runs import run_mixer
from marlinq.models.parts import Slices


def prove_gated_convolution(module: nn.Module) -> GatedConvolution | None:
    """The gated convolution that ``module`` computes, with names relative to it; None if it computes another
    function."""
    children = dict(module.named_children())
    convolutions = [name for name, child in children.items() if isinstance(child, nn.Conv1d)]
    linears = [name for name, child in children.items() if is_linear(child)]
    if len(convolutions) != 1 or len(linears) != 2 or any(True for _ in module.parameters(recurse=False)):
        return None
    others = [child for name, child in children.items() if name not in (*convolutions, *linears)]
    convolution = children[convolutions[0]]
    assert isinstance(convolution, nn.Conv1d)
    channels = convolution.out_channels
    depthwise = convolution.groups == channels and convolution.in_channels == channels
    if not depthwise or any(True for child in others for _ in child.parameters()):
        return None
    run = run_mixer(module, linears)
    if run is None or len(run.calls) != 2:
        return None
    first, last = run.calls
    if first.width != 3 * channels or not close(first.given, run.x):
        return None
    inputs, taps = Slices((first.name,), (channels,) * 3), convolution.kernel_size[0]
    held = dict(run.probe.named_parameters())
    weight, bias = held[f"{convolutions[0]}.weight"][:, 0], held.get(f"{convolutions[0]}.bias")
    for gate in range(3):
        found = GatedConvolution(inputs, gate, convolutions[0], taps, last.name)
        given, behind = found.parts(inputs.split(first.output))
        before = given.new_zeros(1, taps - 1, channels)
        if close(last.given, behind * convolve(given, before, weight, bias)):
            return found
    return None
