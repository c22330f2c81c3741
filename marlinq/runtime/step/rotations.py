"""Rotary embeddings of a model in torch: cosines and signed sines at given positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from marlinq.models.anatomy import Anatomy, Attention, LatentAttention, Rotary

Turns = dict[Rotary, tuple[Tensor, Tensor, Tensor]]


class Rotations:
    """Cosines and signed sines of every rotary embedding of a model.

    A head x [D] becomes ``x * cosines + x[partner] * sines``: channels that are not rotated have a cosine
    of 1 and a sine of 0.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        self._channels: dict[Rotary, _Channels] = {}
        for layer in anatomy.layers:
            attention = layer.attention
            if not isinstance(attention, Attention | LatentAttention) or attention.rotary is None:
                continue
            if attention.rotary not in self._channels:
                size = attention.head_dim if isinstance(attention, Attention) else attention.rotated_dim
                held = _Channels.of(model, attention.rotary, size)
                self._channels[attention.rotary] = held

    def at(self, positions: Tensor) -> Turns:
        """Cosines and sines [..., 1, D] at ``positions`` [...], and the partners [D]."""
        wide = positions.float()[..., None, None]
        return {rotary: channels.turn(wide) for rotary, channels in self._channels.items()}


def frequencies_of(model: nn.Module, rotary: Rotary) -> Tensor:
    """Radians a position of each rotated pair, float32 [channels / 2]."""
    frequencies = model.get_submodule(rotary.module).get_buffer(rotary.frequencies).float()
    return -frequencies if rotary.backward else frequencies


@dataclass(frozen=True, eq=False)
class _Channels:
    """Tensors [D] with a value for each channel of a head: radians a position, factors of cosine and sine,
    index of the partner channel."""

    frequencies: Tensor
    cosine: Tensor
    sine: Tensor
    partner: Tensor

    @classmethod
    def of(cls, model: nn.Module, rotary: Rotary, head_dim: int) -> _Channels:
        held = frequencies_of(model, rotary)
        half, end = rotary.channels // 2, rotary.channels
        channel = torch.arange(end, device=held.device)
        if rotary.interleaved:
            pair, second, other = channel // 2, channel % 2 == 1, channel ^ 1
        else:
            pair, second, other = channel % half, channel >= half, (channel + half) % end
        frequencies, sine = held.new_zeros(head_dim), held.new_zeros(head_dim)
        cosine = held.new_ones(head_dim)
        partner = torch.arange(head_dim, device=held.device)
        frequencies[:end] = held[pair]
        cosine[:end] = rotary.scaling
        sine[:end] = torch.where(second, rotary.scaling, -rotary.scaling)
        partner[:end] = other
        return cls(frequencies, cosine, sine, partner)

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        angles = positions * self.frequencies
        return angles.cos() * self.cosine, angles.sin() * self.sine, self.partner
