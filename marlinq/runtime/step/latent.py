"""Latent attention in torch, with its cache of latents and rotated keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.models.anatomy import LatentAttention

Function = Callable[[Tensor], Tensor]
Turn = tuple[Tensor, Tensor, Tensor] | None
"""Cosines and signed sines [..., 1, rotated channels], and the partner of each channel; None without a
rotation."""


_absorbed: WeakKeyDictionary[nn.Module, tuple[Tensor, Tensor]] = WeakKeyDictionary()


def absorbed_weights(
    model: nn.Module, attention: LatentAttention, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The expansion's weight by head: K_h transposed [H, L, plain channels], and V_h [H, value channels, L].

    They are the products of the module with unit vectors, hence the values that its own kernel uses, whatever
    its format, in the dtype of activations. Made once for each module, and kept with it: they take
    ``2 H L (plain + value channels)`` bytes in 16 bits.
    """
    module = model.get_submodule(attention.expansion)
    kept = _absorbed.get(module)
    if kept is not None and (kept[0].dtype, kept[0].device) == (dtype, device):
        return kept
    units = torch.eye(attention.latent_dim, dtype=dtype, device=device)
    with torch.no_grad():
        columns = module(units)
    by_head = columns.t().reshape(attention.heads, -1, attention.latent_dim)
    keys, values = torch.split(by_head, [attention.plain_dim, attention.value_dim], 1)
    _absorbed[module] = keys.transpose(1, 2).contiguous(), values.contiguous()
    return _absorbed[module]


class LatentLayer:
    """Latent attention with its cache.

    Prompts expand keys and values; steps run over the latents themselves.

    Args:
        model: the model with the modules that ``attention`` names.
        attention: description of the attention.
        inputs: function of its projections of the layer's input.
        query: functions of the norm and the linear behind them that give queries, in order.
        latent_norm: function of the norm of latents.
        expansion: function of the linear that makes keys and values.
        batch, capacity: B and L of the cache.
        dtype, device: those of activations.

    Attributes:
        cache: [B, L, latent and rotated channels].
    """

    def __init__(
        self,
        model: nn.Module,
        attention: LatentAttention,
        *,
        inputs: Callable[[Tensor], Sequence[Tensor]],
        query: Sequence[Function],
        latent_norm: Function,
        expansion: Function,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.attention = attention
        self._inputs, self._query = inputs, query
        self._latent_norm, self._expansion = latent_norm, expansion
        self._keys, self._values = absorbed_weights(model, attention, dtype, device)
        shape = (batch, capacity, attention.cached)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)

    def prompts(self, x: Tensor, turn: Turn) -> Tensor:
        """Prompts x [B, T, hidden] from position 0 on to [B, T, H, value channels]."""
        attention = self.attention
        q, new = self._projected(x, turn)
        self.cache[:, : x.shape[1]] = new
        mixed = expanded_attention(q, new, self._expansion(new[..., : attention.latent_dim]), attention)
        return mixed.transpose(1, 2)

    def step(self, x: Tensor, turn: Turn, positions: Tensor, end: int, mask: Tensor | None) -> Tensor:
        """The next token x [B, 1, hidden] of every row to [B, 1, H, value channels].

        Args:
            x: normalised hidden states.
            turn: rotation at the tokens' positions.
            positions: int64 [B], places of the tokens in the cache.
            end: number of cached tokens that attention reads, these included.
            mask: bool [B, 1, 1, end], or None where all rows see all of them.
        """
        q, new = self._projected(x, turn)
        self.cache[torch.arange(len(x), device=x.device), positions] = new[:, 0]
        # All heads read the same latents, so they are the rows of one product.
        return self._absorbed(q.transpose(1, 2), self.cache[:, None, :end], mask).transpose(1, 2)

    def run(self, x: Tensor, turn: Turn, start: int, mask: Tensor) -> Tensor:
        """Neighbouring tokens x [1, T, hidden] from position ``start`` on to [1, T, H, value channels];
        ``mask`` is bool [T, start + T]."""
        q, new = self._projected(x, turn)
        end = start + x.shape[1]
        self.cache[:, start:end] = new
        seen = self.cache[:, None, :end].expand(-1, self.attention.heads, -1, -1)
        return self._absorbed(q.transpose(1, 2), seen, mask).transpose(1, 2)

    def _projected(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """Queries [B, T, H, plain and rotated channels] and rows of the cache [B, T, channels]."""
        attention = self.attention
        q, latent = self._inputs(x)
        for function in self._query:
            q = function(q)
        q = q.reshape(*q.shape[:-1], attention.heads, -1)
        plain, turning = torch.split(q, [attention.plain_dim, attention.rotated_dim], -1)
        latent, key = torch.split(latent, [attention.latent_dim, attention.rotated_dim], -1)
        turned = _turned(torch.cat((turning, key[..., None, :]), -2), turn)
        q = torch.cat((plain, turned[..., :-1, :]), -1)
        return q, torch.cat((self._latent_norm(latent), turned[..., -1, :]), -1)

    def _absorbed(self, q: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
        """Attention of q [B, H, T, channels] over latents ``seen`` to [B, H, T, value channels]; with T = 1
        the latents are [B, 1, places, channels], else [B, H, places, channels]."""
        attention = self.attention
        plain, turned = torch.split(q, [attention.plain_dim, attention.rotated_dim], -1)
        q = torch.cat((torch.matmul(plain, self._keys.transpose(1, 2)), turned), -1)
        rows = q.transpose(1, 2) if seen.shape[1] == 1 else q
        values = seen[..., : attention.latent_dim]
        mixed = F.scaled_dot_product_attention(rows, seen, values, attn_mask=mask, scale=attention.scale)
        mixed = mixed.transpose(1, 2) if seen.shape[1] == 1 else mixed
        return torch.matmul(mixed, self._values.transpose(1, 2))


def expanded_attention(q: Tensor, rows: Tensor, expanded: Tensor, attention: LatentAttention) -> Tensor:
    """Causal attention of whole prompts with keys and values of each head.

    Args:
        q: queries [B, T, H, plain and rotated channels].
        rows: rows of the cache [B, T, channels].
        expanded: the expansion of their latents, [B, T, H * (plain + value channels)].
        attention: description of the attention.

    Returns:
        [B, H, T, value channels].
    """
    by_head = expanded.reshape(*expanded.shape[:-1], attention.heads, -1)
    keys, values = torch.split(by_head, [attention.plain_dim, attention.value_dim], -1)
    turned = rows[..., None, attention.latent_dim :].expand(-1, -1, attention.heads, -1)
    keys = torch.cat((keys, turned), -1)
    q, keys, values = (each.transpose(1, 2) for each in (q, keys, values))
    return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=attention.scale)


def _turned(x: Tensor, turn: Turn) -> Tensor:
    """Heads [B, T, heads, channels] rotated."""
    if turn is None:
        return x
    cosines, sines, partner = turn
    turned = x * cosines + x.index_select(-1, partner) * sines
    return turned.to(x.dtype)
