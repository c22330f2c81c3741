"""Finds recurrent mixers in a decoder block: modules with a convolution that compute a known formula."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from marlinq.models.convolution import GatedConvolution
from marlinq.models.delta_net import DeltaNet
from marlinq.models.mamba import Mamba
from marlinq.models.recognise_channel_delta import prove_channel_delta_net
from marlinq.models.recognise_convolution import prove_gated_convolution
from marlinq.models.recognise_delta import prove_delta_net
from marlinq.models.recognise_mamba import prove_mamba

Mixer = DeltaNet | Mamba | GatedConvolution

# (class, shapes, attributes) -> mixer with names relative to the module; None for other modules.
_proved: dict[tuple[object, ...], Mixer | None] = {}


def find_mixers(name: str, block: nn.Module) -> dict[str, Mixer]:
    """Full name -> mixer, for each module in ``block`` that computes a gated delta net, a Mamba-2 mixer or a
    gated convolution."""
    found: dict[str, Mixer] = {}
    for inner, module in block.named_modules():
        if not inner or not any(isinstance(child, nn.Conv1d) for child in module.children()):
            continue
        key = (
            type(module),
            *((at, tuple(value.shape)) for at, value in module.named_parameters()),
            *_plain(module),
        )
        if key not in _proved:
            _proved[key] = (
                prove_delta_net(module)
                or prove_channel_delta_net(module)
                or prove_mamba(module)
                or prove_gated_convolution(module)
            )
        mixer = _proved[key]
        if mixer is not None:
            found[f"{name}.{inner}"] = mixer.within(f"{name}.{inner}")
    return found


def _plain(module: nn.Module) -> Iterator[tuple[str, str, object]]:
    """(module, attribute, value) of all numbers, texts and pairs of numbers in ``module`` and its
    submodules."""
    for inner, each in module.named_modules():
        for key, value in vars(each).items():
            if isinstance(value, (tuple, list)) and all(isinstance(part, (int, float)) for part in value):
                yield inner, key, tuple(value)
            if isinstance(value, (int, float, str)) and key != "layer_idx":
                yield inner, key, value
