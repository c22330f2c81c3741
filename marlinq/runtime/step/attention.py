"""Attention with grouped queries in torch: of prompts, of single tokens, of neighbouring ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.models.anatomy import Attention

_FUSED_CHANNELS = 256
"""Channels of a head up to which torch's fused attention takes a whole prompt."""
_ROW_BLOCK = 512
"""Queries processed at a time where torch's fused attention can't be used, so that scores take bounded
memory."""


def attention_sinks(model: nn.Module, attention: Attention) -> Tensor | None:
    """The attention's sinks, float32 [H], or None."""
    if attention.sinks is None:
        return None
    return model.get_parameter(attention.sinks).detach().float().contiguous()


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, attention: Attention, sinks: Tensor | None = None
) -> Tensor:
    """Attention of a whole prompt: q [B, H, T, D], k and v [B, KV, T, D] to [B, H, T, D].

    ``sinks``, float32 [H], are what :func:`attention_sinks` gives.
    """
    length, window = q.shape[2], attention.window
    plain = attention.softcap is None and sinks is None and attention.head_dim <= _FUSED_CHANNELS
    if plain and (window is None or window >= length):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=attention.scale, enable_gqa=attention.heads != attention.kv_heads
        )
    places = torch.arange(length, device=q.device)
    blocks = []
    for start in range(0, length, _ROW_BLOCK):
        end = min(start + _ROW_BLOCK, length)
        first = 0 if window is None else max(0, start + 1 - window)
        query, key = places[start:end, None], places[first:end]
        mask = key <= query
        if window is not None:
            mask &= key > query - window
        seen = k[:, :, first:end], v[:, :, first:end]
        blocks.append(masked(q[:, :, start:end], *seen, mask, attention, sinks))
    return torch.cat(blocks, 2)


def one_query(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attention: Attention, sinks: Tensor | None
) -> Tensor:
    """Attention of one token: q [B, 1, H, D], k and v [B, KV, places, D] to [B, 1, H, D]."""
    # The queries that share a key are the rows of one product.
    grouped = q.reshape(q.shape[0], attention.kv_heads, -1, q.shape[-1])
    if attention.softcap is None and sinks is None:
        result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=attention.scale)
    else:
        of_rows = None if sinks is None else sinks.view(attention.kv_heads, -1, 1)
        result = _product(grouped, k, v, mask, attention, of_rows)
    return result.flatten(1, 2)[:, None]


def masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, attention: Attention, sinks: Tensor | None
) -> Tensor:
    """Attention under a mask: q [B, H, T, D], k and v [B, KV, places, D] to [B, H, T, D].

    ``mask``, bool, broadcasts to [B, H, T, places]: True where a query sees a place.
    """
    if attention.softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=attention.scale, enable_gqa=attention.heads != attention.kv_heads
        )
    grouped = q.reshape(q.shape[0], attention.kv_heads, -1, *q.shape[2:])
    of_rows = None if sinks is None else sinks.view(attention.kv_heads, -1, 1, 1)
    return _product(grouped, k[:, :, None], v[:, :, None], mask, attention, of_rows).flatten(1, 2)


def _product(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attention: Attention, sinks: Tensor | None
) -> Tensor:
    """Attention of rows of queries; ``sinks`` are broadcast to one number a row."""
    scores = capped(torch.matmul(q, k.transpose(-1, -2)) * attention.scale, attention.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    scores = scores.float()
    if sinks is not None:
        # The sink is one more column of scores, without a value.
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        return torch.matmul(scores.softmax(-1)[..., :-1].to(q.dtype), v)
    return torch.matmul(scores.softmax(-1).to(q.dtype), v)


def capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)
