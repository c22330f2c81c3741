"""Prompts through latent attention of the chain, in torch, behind its projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from marlinq.kernels.step import LatentWeights
from marlinq.runtime.step.bound import BoundLatent

_HEADS = 16
"""Heads whose keys and values exist at a time: of 8,192 tokens, 16 of DeepSeek-V3's heads take 120 MB."""


def append_latents(
    latent: BoundLatent, q: Tensor, rows: Tensor, part: slice, start: int, tokens: int
) -> Tensor:
    """Put latents and rotated keys of a piece of prompts into the cache; returns its rotated queries.

    Args:
        latent: the attention.
        q: [b * T, H * (plain and rotated channels)].
        rows: [b * T, width], latents before their norm and keys before their rotation.
        part: the b rows of the batch.
        start: position of the first token.
        tokens: T.

    Returns:
        [b * T, H, plain and rotated channels].
    """
    weights = latent.weights
    positions = torch.arange(start, start + tokens, device=q.device).repeat(len(q) // tokens)
    by_head = q.reshape(len(q), weights.heads, -1)
    plain, turning = torch.split(by_head, [weights.plain_dim, weights.rotated_dim], -1)
    c, key = torch.split(rows, [weights.latent_dim, weights.rotated_dim], -1)
    turned = _turned(torch.cat((turning, key[:, None]), 1), positions, weights)
    new = torch.cat((_normed(c, weights), turned[:, -1]), -1)
    latent.cache[part, start : start + tokens] = new.view(-1, tokens, weights.width)
    return torch.cat((plain, turned[:, :-1]), -1)


def prompt_attention(latent: BoundLatent, queries: Tensor, rows: Tensor) -> Tensor:
    """Causal attention of whole prompts, whose keys and values are expanded for some heads at a time.

    Args:
        latent: the attention.
        queries: [b, T, H, plain and rotated channels].
        rows: [b, T, width], of the cache.

    Returns:
        [b * T, H * value channels].
    """
    weights = latent.weights
    c, turned = torch.split(rows[:, None], [weights.latent_dim, weights.rotated_dim], -1)
    mixed = queries.new_empty((*queries.shape[:3], weights.value_dim))
    for first in range(0, weights.heads, _HEADS):
        heads = slice(first, min(first + _HEADS, weights.heads))
        keys = torch.matmul(c, weights.keys[heads])
        keys = torch.cat((keys, turned.expand(-1, keys.shape[1], -1, -1)), -1)
        values = torch.matmul(c, weights.values[heads].transpose(1, 2))
        q = queries[:, :, heads].transpose(1, 2)
        scale = latent.attention.scale
        some = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale)
        mixed[:, :, heads] = some.transpose(1, 2)
    return mixed.view(-1, weights.heads * weights.value_dim)


def _normed(x: Tensor, weights: LatentWeights) -> Tensor:
    norm = weights.norm
    wide = F.rms_norm(x.float(), (weights.latent_dim,), None, norm.eps)
    if norm.kind == "RMS":
        wide = wide.to(x.dtype).float()
    assert norm.weight is not None
    return (wide * (norm.weight.float() + norm.offset)).to(x.dtype)


def _turned(x: Tensor, positions: Tensor, weights: LatentWeights) -> Tensor:
    """x [M, heads, rotated channels] at ``positions`` [M]."""
    cosines, sines = weights.table[positions][:, None].unbind(-1)
    wide = x.float()
    half = weights.rotated_dim // 2
    first, second = (wide[..., 0::2], wide[..., 1::2]) if weights.interleaved else torch.split(wide, half, -1)
    one, two = first * cosines - second * sines, second * cosines + first * sines
    turned = torch.stack((one, two), -1).flatten(-2) if weights.interleaved else torch.cat((one, two), -1)
    return turned.to(x.dtype)
