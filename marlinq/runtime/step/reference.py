"""The forward in plain torch: the reference for the kernels' forward, and the forward used on CPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.models.anatomy import (
    MLP,
    Anatomy,
    Attention,
    DeltaNet,
    LatentAttention,
    Layer,
    Mamba,
    Mixture,
    Norm,
    Rotary,
    Router,
    Slices,
)
from marlinq.models.formulas import ACTIVATIONS
from marlinq.runtime.step.delta import DeltaLayer
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.latent import LatentLayer
from marlinq.runtime.step.mamba import MambaLayer
from marlinq.runtime.threads import threads_at_most

Function = Callable[[Tensor], Tensor]
Chosen = Callable[[Tensor, Tensor], None]
Mixing = Attention | LatentAttention | DeltaNet | Mamba | None
"""What stands in a layer's place of attention."""

_ROW_BLOCK = 512
"""Queries processed at a time where torch's fused attention can't be used, so that scores take bounded
memory."""
MOST_VERIFIED = 8
"""Tokens of a verification: products of up to eight rows read the weights once."""
# Time of a verification, in steps.
_VERIFICATION_COST = 2.5
_ALONE = 1 << 18
"""Elements of keys up to which a step's attention runs on one thread of a CPU. Reading 2 x 2^18 float32
values takes 0.2 ms; waking a second thread takes 20 us, or milliseconds if another process runs on its
core."""


class ReferenceForward(Forward):
    """Computes ``anatomy`` in torch, with the model's own linears, embeddings and norm weights.

    The host knows the lengths, so that a step reads only the used part of the cache; so steps can't be
    captured. Rows of equal length need no mask.

    Args:
        model: the model with the modules that the anatomy names, on one device. Weights of dense linears and
            norms are copied at construction.
        anatomy: description of the model to compute.
        batch, capacity: B and L.
        reason: as in :class:`Forward`.
    """

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, *, batch: int, capacity: int, reason: str = "torch"
    ) -> None:
        self.batch, self.capacity = batch, capacity
        self.reason = reason
        self.capturable = False
        self.anatomy = anatomy
        self._embedding = _weight(model, anatomy.embedding)
        self._positions = None if anatomy.positions is None else _weight(model, anatomy.positions)
        device, self._dtype = self._embedding.device, self._embedding.dtype
        self._embedding_norm = _norm(model, anatomy.embedding_norm, self._dtype)
        self._final_norm = _norm(model, anatomy.final_norm, self._dtype)
        self._head = _linear(model, anatomy.head)
        self._rotations = _Rotations(model, anatomy)
        self._layers = [_LayerParts.of(model, layer, self._dtype, self._chosen) for layer in anatomy.layers]
        self._mixers = [_mixer(model, layer.attention, batch, self._dtype) for layer in anatomy.layers]
        self._beside = [_mixer(model, layer.beside, batch, self._dtype) for layer in anatomy.layers]
        self._latents = [
            _latent(model, layer.attention, batch, capacity, self._embedding) for layer in anatomy.layers
        ]
        self._keys = [self._cache(layer.attention, device) for layer in anatomy.layers]
        self._values = [torch.zeros_like(keys) for keys in self._keys]
        self._rows = torch.arange(batch, device=device)
        self._places = torch.arange(capacity, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._shortest = self._longest = 0
        # A mixer's state can't return to an earlier token, so drafts can't be verified.
        has_states = any(mixer is not None for mixer in (*self._mixers, *self._beside))
        self.most_verified = MOST_VERIFIED if batch == 1 and not has_states else 0
        self.verification_cost = _VERIFICATION_COST
        self._routing = 0

    def _chosen(self, index: Tensor, weights: Tensor) -> None:
        if self.observe_routing is not None:
            self.observe_routing(self._routing, index, weights)

    def _cache(self, attention: Mixing, device: torch.device) -> Tensor:
        if not isinstance(attention, Attention):
            return torch.empty(0, device=device)
        shape = (self.batch, attention.kv_heads, self.capacity, attention.head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=device)

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """As in :class:`Forward`.

        Raises:
            ValueError: ``ids`` is of another batch or longer than the capacity, or a length is not 1..T.
        """
        counts = self.check_prompts(ids, lengths)
        with torch.inference_mode():
            logits = self._prefill(ids, lengths, min(counts), max(counts))
        return logits.clone()

    def _prefill(self, ids: Tensor, lengths: Tensor, shortest: int, longest: int) -> Tensor:
        self._shortest, self._longest = shortest, longest
        width = ids.shape[1]
        self.lengths.copy_(lengths)
        positions = self._places[:width]
        x = self._embed(ids, positions)
        turns = self._rotations.at(positions)
        for index, parts in enumerate(self._layers):
            self._routing = index
            beside = self._prompt_mixer(self._beside[index])
            x = parts.forward(x, self._prompt_attention(index, parts, turns), beside)
            if self.observe is not None:
                self.observe(index, x)
        last = x[self._rows, self.lengths.long() - 1]
        return self._logits(last)

    def keep(self, length: int) -> None:
        """As in :class:`Forward`."""
        super().keep(length)
        self._shortest = self._longest = length

    def step(self, tokens: Tensor) -> Tensor:
        """As in :class:`Forward`.

        Raises:
            ValueError: the cache is full.
        """
        if self._longest >= self.capacity:
            raise ValueError(f"the cache is full: {self.capacity} tokens")
        with torch.inference_mode():
            logits = self._step(tokens)
        # Cloned: a sampler may change logits in place, which inference tensors forbid.
        return logits.clone()

    def _step(self, tokens: Tensor) -> Tensor:
        positions = self.lengths.long()
        x = self._embed(tokens[:, None], positions[:, None])
        turns = self._rotations.at(positions[:, None])
        masks: dict[int | None, tuple[int, Tensor | None]] = {}
        for index, parts in enumerate(self._layers):
            self._routing = index
            mixer = self._mixers[index]
            if mixer is not None:
                x = parts.forward(x, mixer.step)
            elif parts.layer.attention is None:
                x = parts.forward(x, None)
            else:
                window = parts.window
                if window not in masks:
                    masks[window] = self._visible(positions, window)
                beside = self._beside[index]
                attend = self._step_attention(index, parts, turns, positions, *masks[window])
                x = parts.forward(x, attend, None if beside is None else beside.step)
            if self.observe is not None:
                self.observe(index, x)
        self._shortest += 1
        self._longest += 1
        self.lengths += 1
        return self._logits(x[:, 0])

    def verify(self, tokens: Tensor) -> Tensor:
        """As in :class:`Forward`.

        Raises:
            ValueError: the batch is not 1, or the cache has no room for all.
        """
        start, end = self._longest, self._longest + len(tokens)
        if self.batch != 1 or end > self.capacity:
            raise ValueError(f"{end} tokens of {self.batch} rows: expected at most {self.capacity} of one")
        with torch.inference_mode():
            positions = self._places[start:end]
            x = self._embed(tokens[None], positions)
            turns = self._rotations.at(positions)
            for index, parts in enumerate(self._layers):
                x = parts.forward(x, self._run_attention(index, parts, turns, start))
            logits = self._logits(x[0])
        return logits.clone()

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(ids, self._embedding)
        if self.anatomy.embedding_scale != 1:
            x = x * self.anatomy.embedding_scale
        if self._positions is not None:
            x = x + F.embedding(positions + self.anatomy.positions_offset, self._positions)
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def _logits(self, x: Tensor) -> Tensor:
        logits = self._head(x if self._final_norm is None else self._final_norm(x))
        if self.anatomy.logit_scale != 1:
            logits = logits * self.anatomy.logit_scale
        return _capped(logits, self.anatomy.logit_softcap)

    def _prompt_mixer(self, mixer: DeltaLayer | MambaLayer | None) -> Function | None:
        return None if mixer is None else lambda x: mixer.prompts(x, self.lengths)

    def _prompt_attention(self, index: int, parts: _LayerParts, turns: _Turns) -> Function | None:
        mixer = self._prompt_mixer(self._mixers[index])
        if mixer is not None:
            return mixer
        latent = self._latents[index]
        if latent is not None:
            return lambda x: latent.prompts(x, turns[latent.attention.rotary])
        if parts.layer.attention is None:
            return None

        def attend(x: Tensor) -> Tensor:
            *heads, gate = parts.heads(x, turns)
            q, k, v = (each.transpose(1, 2) for each in heads)
            self._keys[index][:, :, : x.shape[1]] = k
            self._values[index][:, :, : x.shape[1]] = v
            mixed = causal_attention(q, k, v, parts.attention, parts.sinks)
            return _gated(mixed.transpose(1, 2), gate)

        return attend

    def _step_attention(
        self,
        index: int,
        parts: _LayerParts,
        turns: _Turns,
        positions: Tensor,
        first: int,
        mask: Tensor | None,
    ) -> Function:
        end = self._longest + 1
        latent = self._latents[index]

        def attend_latents(x: Tensor) -> Tensor:
            assert latent is not None
            alone = x.is_cpu and latent.cache[:, :end].numel() <= _ALONE
            with threads_at_most(1 if alone else None):
                return latent.step(x, turns[latent.attention.rotary], positions, end, mask)

        def attend(x: Tensor) -> Tensor:
            q, k, v, gate = parts.heads(x, turns)
            keys, values = self._keys[index], self._values[index]
            if self._shortest == self._longest:
                keys[:, :, self._longest] = k[:, 0]
                values[:, :, self._longest] = v[:, 0]
            else:
                keys[self._rows, :, positions] = k[:, 0]
                values[self._rows, :, positions] = v[:, 0]
            seen = keys[:, :, first:end]
            with threads_at_most(1 if seen.is_cpu and seen.numel() <= _ALONE else None):
                mixed = _one_query(q, seen, values[:, :, first:end], mask, parts)
            return _gated(mixed, gate)

        return attend if latent is None else attend_latents

    def _run_attention(self, index: int, parts: _LayerParts, turns: _Turns, start: int) -> Function | None:
        """Attention of neighbouring tokens of one row, the first of them at position ``start``; None in a
        layer without attention."""
        if parts.layer.attention is None:
            return None
        keys, values, window = self._keys[index], self._values[index], parts.window
        latent = self._latents[index]

        def attend_latents(x: Tensor) -> Tensor:
            assert latent is not None
            end = start + x.shape[1]
            mask = self._places[:end] <= self._places[start:end, None]
            return latent.run(x, turns[latent.attention.rotary], start, mask)

        def attend(x: Tensor) -> Tensor:
            *heads, gate = parts.heads(x, turns)
            q, k, v = (each.transpose(1, 2) for each in heads)
            end = start + x.shape[1]
            keys[:, :, start:end] = k
            values[:, :, start:end] = v
            first = 0 if window is None else max(0, start + 1 - window)
            query, place = self._places[start:end, None], self._places[first:end]
            mask = place <= query
            if window is not None:
                mask &= place > query - window
            seen = keys[:, :, first:end], values[:, :, first:end]
            mixed = _masked(q, *seen, mask=mask, attention=parts.attention, sinks=parts.sinks)
            return _gated(mixed.transpose(1, 2), gate)

        return attend if latent is None else attend_latents

    def _visible(self, positions: Tensor, window: int | None) -> tuple[int, Tensor | None]:
        """The first position of the cache that any row sees, and a mask of the positions from there on.

        The mask is bool [B, 1, 1, places], or None where every row sees all of them.
        """
        first = 0 if window is None else max(0, self._shortest + 1 - window)
        if self._shortest == self._longest:
            return first, None
        places = self._places[first : self._longest + 1]
        mask = places <= positions[:, None]
        if window is not None:
            mask &= places > positions[:, None] - window
        return first, mask[:, None, None]


_Turns = dict[Rotary, tuple[Tensor, Tensor, Tensor]]


class _Rotations:
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

    def at(self, positions: Tensor) -> _Turns:
        """Cosines and sines [..., 1, D] at ``positions`` [...], and the partners [D]."""
        wide = positions.float()[..., None, None]
        return {rotary: channels.turn(wide) for rotary, channels in self._channels.items()}


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
        held = model.get_submodule(rotary.module).get_buffer(rotary.frequencies).float()
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


@dataclass(frozen=True, eq=False)
class _LayerParts:
    """A layer with functions for its modules; for a recurrent mixer only those around it. A part that the
    layer lacks has None."""

    layer: Layer
    attention_norm: Function | None
    post_attention_norm: Function | None
    mlp_norm: Function | None
    post_mlp_norm: Function | None
    query_norm: Function | None
    key_norm: Function | None
    qkv: Callable[[Tensor], Sequence[Tensor]] | None
    output: Function | None
    beside_output: Function | None
    mlp: Function | None
    sinks: Tensor | None

    @classmethod
    def of(cls, model: nn.Module, layer: Layer, dtype: torch.dtype, chosen: Chosen) -> _LayerParts:
        attention = layer.attention
        norms: tuple[Norm | None, Norm | None] = (None, None)
        sinks = None
        if isinstance(attention, Attention):
            norms = attention.query_norm, attention.key_norm
            sinks = attention_sinks(model, attention)
        return cls(
            layer=layer,
            attention_norm=_norm(model, layer.attention_norm, dtype),
            post_attention_norm=_norm(model, layer.post_attention_norm, dtype),
            mlp_norm=_norm(model, layer.mlp_norm, dtype),
            post_mlp_norm=_norm(model, layer.post_mlp_norm, dtype),
            query_norm=_norm(model, norms[0], dtype),
            key_norm=_norm(model, norms[1], dtype),
            qkv=_parts(model, attention.qkv) if isinstance(attention, Attention) else None,
            output=None if attention is None else _linear(model, attention.output),
            beside_output=None if layer.beside is None else _linear(model, layer.beside.output),
            mlp=_mixture(model, layer.mlp, chosen)
            if isinstance(layer.mlp, Mixture)
            else None
            if layer.mlp is None
            else _mlp(model, layer.mlp),
            sinks=sinks,
        )

    @property
    def attention(self) -> Attention:
        assert isinstance(self.layer.attention, Attention)
        return self.layer.attention

    @property
    def window(self) -> int | None:
        """Positions that a query sees at most; None for all."""
        return self.layer.attention.window if isinstance(self.layer.attention, Attention) else None

    def forward(self, x: Tensor, attend: Function | None, beside: Function | None = None) -> Tensor:
        """x [B, T, hidden] through the block; ``attend`` makes [B, T, H, D] of normalised hidden states, None
        in a layer without attention, and so does ``beside`` for the mixer beside attention."""
        layer = self.layer
        if attend is not None and self.output is not None:
            normed = x if self.attention_norm is None else self.attention_norm(x)
            a = self.output(attend(normed).flatten(-2))
            if self.post_attention_norm is not None:
                a = self.post_attention_norm(a)
            if layer.parallel:
                shared = layer.mlp_norm == layer.attention_norm
                m = self._mlp(normed if shared else x if self.mlp_norm is None else self.mlp_norm(x))
                return x.add(a + m, alpha=layer.attention_scale)
            x = x.add(a, alpha=layer.attention_scale)
            if beside is not None and self.beside_output is not None:
                x = x.add(self.beside_output(beside(normed).flatten(-2)), alpha=layer.beside_scale)
        if self.mlp is None:
            return x
        return x.add(self._mlp(x if self.mlp_norm is None else self.mlp_norm(x)), alpha=layer.mlp_scale)

    def _mlp(self, x: Tensor) -> Tensor:
        assert self.mlp is not None
        m = self.mlp(x)
        return m if self.post_mlp_norm is None else self.post_mlp_norm(m)

    def heads(self, x: Tensor, turns: _Turns) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Rotated queries [B, T, H, D], rotated keys and values [B, T, KV, D], and gates [B, T, H, D]."""
        attention = self.attention
        assert self.qkv is not None
        q, k, v = self.qkv(x)
        gate = None
        if attention.gated:
            q, gate = q.reshape(*q.shape[:-1], attention.heads, 2, -1).unbind(-2)
            q = q.flatten(-2)
        q = _by_head(q, attention.heads, attention.query_norm, self.query_norm)
        k = _by_head(k, attention.kv_heads, attention.key_norm, self.key_norm)
        if attention.rotary is not None:
            cosines, sines, partner = turns[attention.rotary]
            both = torch.cat((q, k), -2)
            turned = both * cosines
            turned.addcmul_(both.index_select(-1, partner).to(turned.dtype), sines)
            q, k = torch.split(turned.to(q.dtype), [attention.heads, attention.kv_heads], -2)
        return q, k, _heads(v, attention.kv_heads), gate


def _gated(x: Tensor, gate: Tensor | None) -> Tensor:
    return x if gate is None else x * torch.sigmoid(gate)


def _mixer(model: nn.Module, mixer: Mixing, batch: int, dtype: torch.dtype) -> DeltaLayer | MambaLayer | None:
    """The recurrent mixer in the place of attention, or None."""
    if isinstance(mixer, Mamba):
        return MambaLayer(model, mixer, _parts(model, mixer.inputs), batch, dtype)
    if not isinstance(mixer, DeltaNet):
        return None
    norm = _norm(model, mixer.norm, dtype)
    assert norm is not None
    return DeltaLayer(
        model, mixer, _parts(model, mixer.inputs), _parts(model, mixer.rates), norm, batch, dtype
    )


def _latent(
    model: nn.Module,
    attention: Mixing,
    batch: int,
    capacity: int,
    like: Tensor,
) -> LatentLayer | None:
    """The layer's latent attention for activations of the dtype and on the device of ``like``."""
    if not isinstance(attention, LatentAttention):
        return None
    norm = _norm(model, attention.latent_norm, like.dtype)
    assert norm is not None
    query = () if attention.query is None else (_linear(model, attention.query),)
    query_norm = _norm(model, attention.query_norm, like.dtype)
    return LatentLayer(
        model,
        attention,
        inputs=_parts(model, attention.inputs),
        query=query if query_norm is None else (query_norm, *query),
        latent_norm=norm,
        expansion=_linear(model, attention.expansion),
        batch=batch,
        capacity=capacity,
        dtype=like.dtype,
        device=like.device,
    )


def _heads(x: Tensor, heads: int) -> Tensor:
    """[..., heads * D] to [..., heads, D]."""
    return x.reshape(*x.shape[:-1], heads, -1)


def _by_head(x: Tensor, heads: int, norm: Norm | None, normalise: Function | None) -> Tensor:
    """[..., heads * D] to [..., heads, D], normalised over all heads or each."""
    if norm is None or normalise is None:
        return _heads(x, heads)
    if norm.width == x.shape[-1]:
        return _heads(normalise(x), heads)
    return normalise(_heads(x, heads))


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
    if attention.softcap is None and sinks is None and (window is None or window >= length):
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
        blocks.append(_masked(q[:, :, start:end], *seen, mask, attention, sinks))
    return torch.cat(blocks, 2)


def _one_query(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, parts: _LayerParts) -> Tensor:
    """Attention of one token: q [B, 1, H, D], k and v [B, KV, places, D] to [B, 1, H, D]."""
    attention, sinks = parts.attention, parts.sinks
    # The queries that share a key are the rows of one product.
    grouped = q.reshape(q.shape[0], attention.kv_heads, -1, q.shape[-1])
    if attention.softcap is None and sinks is None:
        result = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=attention.scale)
    else:
        of_rows = None if sinks is None else sinks.view(attention.kv_heads, -1, 1)
        result = _product(grouped, k, v, mask, attention, of_rows)
    return result.flatten(1, 2)[:, None]


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, attention: Attention, sinks: Tensor | None
) -> Tensor:
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
    scores = _capped(torch.matmul(q, k.transpose(-1, -2)) * attention.scale, attention.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    scores = scores.float()
    if sinks is not None:
        # The sink is one more column of scores, without a value.
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        return torch.matmul(scores.softmax(-1)[..., :-1].to(q.dtype), v)
    return torch.matmul(scores.softmax(-1).to(q.dtype), v)


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _weight(model: nn.Module, module: str) -> Tensor:
    return model.get_submodule(module).get_parameter("weight").detach()


def _linear(model: nn.Module, name: str) -> Function:
    module = model.get_submodule(name)
    if type(module) is not nn.Linear:
        return module
    weight = module.weight.detach()
    bias: Tensor | None = module.bias
    return lambda x: F.linear(x, weight, bias)


def _mlp(model: nn.Module, mlp: MLP) -> Function:
    inputs, down = _parts(model, mlp.inputs), _linear(model, mlp.down)
    activation = ACTIVATIONS[mlp.activation]

    def run(x: Tensor) -> Tensor:
        first, *rest = inputs(x)
        result = activation(first if mlp.gate_scale == 1 else first * mlp.gate_scale)
        return down(result * rest[0] if rest else result)

    return run


def route(logits: Tensor, router: Router, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Numbers, int64, and weights, float32, of the experts that logits [T, experts] choose: both [T, top].

    ``correction``, float32 [experts], affects the choice but not the weights.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if router.scoring == "softmax" else wide.sigmoid()
    decisive = scores if correction is None else scores + correction
    if router.groups is not None:
        decisive = router.groups.limited(decisive)
    index = decisive.topk(router.top, -1).indices
    weights = scores.gather(-1, index)
    if router.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return index, weights * router.scale


def _mixture(model: nn.Module, mixture: Mixture, chosen: Chosen) -> Function:
    """A function of a mixture layer; ``chosen`` is called with the experts' numbers and weights, [B, T,
    top]."""
    experts = model.get_submodule(mixture.experts)
    router = mixture.router
    weight = _weight(model, router.module)
    bias = None if router.bias is None else model.get_parameter(router.bias).detach()
    correction = None if router.correction is None else model.get_buffer(router.correction).float()
    shared = None if mixture.shared is None else _mlp(model, mixture.shared)
    gate = None if mixture.shared_gate is None else _linear(model, mixture.shared_gate)

    def run(x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        logits = F.linear(rows.float(), weight.float()) if router.wide else F.linear(rows, weight, bias)
        index, counts = route(logits, router, correction)
        chosen(index.view(*x.shape[:-1], -1), counts.view(*x.shape[:-1], -1))
        m: Tensor = experts(rows, index, counts).view(x.shape)
        if shared is not None:
            always = shared(x)
            m = m + (always if gate is None else torch.sigmoid(gate(x)) * always)
        return m

    return run


def _parts(model: nn.Module, slices: Slices) -> Callable[[Tensor], Sequence[Tensor]]:
    """The parts of a joined product, each [..., width]."""
    linears = [_linear(model, name) for name in slices.modules]
    if len(linears) == len(slices.widths) and slices.turns == 1:
        return lambda x: [linear(x) for linear in linears]

    def split(x: Tensor) -> Sequence[Tensor]:
        products = [linear(x) for linear in linears]
        joined = products[0] if len(products) == 1 else torch.cat(products, -1)
        return slices.split(joined)

    return split


def _norm(model: nn.Module, norm: Norm | None, dtype: torch.dtype) -> Function | None:
    """The norm of activations of ``dtype``."""
    if norm is None:
        return None
    module = model.get_submodule(norm.module)
    held = {name: value.detach() for name, value in module.named_parameters()}
    weight, bias, eps, shape = held.get("weight"), held.get("bias"), norm.eps, (norm.width,)
    if weight is not None:
        # Exact in float32; rounded again only where the model multiplies in its narrow dtype.
        weight = weight.float() + norm.offset
    wide = torch.float32
    if norm.kind == "layer":
        bias = None if bias is None else bias.float()
        if dtype == wide:
            return lambda x: F.layer_norm(x, shape, weight, bias, eps)
        return lambda x: F.layer_norm(x.float(), shape, weight, bias, eps).to(dtype)
    if dtype == wide and bias is None and weight is not None:
        # sqrt(mean + eps) is hypot(norm, sqrt(width * eps)) / sqrt(width): half as many kernels on a CPU.
        scaled, floor = weight * math.sqrt(norm.width), weight.new_tensor(math.sqrt(norm.width * eps))
        return lambda x: x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor) * scaled

    def rms(x: Tensor) -> Tensor:
        x = F.rms_norm(x.float(), shape, None, eps)
        if norm.narrow_first:
            x = x.to(dtype).float()
        if weight is not None:
            x = x * weight
        return (x if bias is None else x + bias.float()).to(dtype)

    return rms
