"""The forward in plain torch: the reference for the kernels' forward, and the forward used on CPUs."""

from __future__ import annotations

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
    GatedConvolution,
    LatentAttention,
    Layer,
    Mamba,
    Mixture,
    Norm,
)
from marlinq.runtime.step.attention import attention_sinks, capped, causal_attention, masked, one_query
from marlinq.runtime.step.convolution import ConvolutionLayer
from marlinq.runtime.step.delta import DeltaLayer
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.functions import (
    Chosen,
    Function,
    gate_of,
    input_gate_of,
    layer_inputs_of,
    linear_of,
    mixture_of,
    mlp_of,
    norm_of,
    parts_of,
    weight_of,
)
from marlinq.runtime.step.latent import LatentLayer, Turn
from marlinq.runtime.step.mamba import MambaLayer
from marlinq.runtime.step.rotations import Rotations, Turns
from marlinq.runtime.threads import threads_at_most

Mixing = Attention | LatentAttention | DeltaNet | Mamba | GatedConvolution | None
"""A layer's attention, or the mixer in its place; None in a layer without either."""

MixerLayer = DeltaLayer | MambaLayer | ConvolutionLayer

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

    The host knows the lengths, so that a step reads only the used part of the cache; hence steps can't be
    captured into CUDA graphs. Rows of equal length need no mask.

    Args:
        model: the model with the modules that the anatomy names, on one device. Weights of dense linears and
            norms are copied at construction.
        anatomy: description of the model to compute.
        batch, capacity: B and L.
        reason: as in :class:`Forward`.
        keeps_hidden: whether :attr:`hidden_states` are kept.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        *,
        batch: int,
        capacity: int,
        reason: str = "torch",
        keeps_hidden: bool = False,
    ) -> None:
        self.batch, self.capacity = batch, capacity
        self.reason = reason
        self.capturable = False
        self.anatomy = anatomy
        self._embedding = weight_of(model, anatomy.embedding)
        self._positions = None if anatomy.positions is None else weight_of(model, anatomy.positions)
        device, self._dtype = self._embedding.device, self._embedding.dtype
        self._embedding_norm = norm_of(model, anatomy.embedding_norm, self._dtype)
        self._final_norm = norm_of(model, anatomy.final_norm, self._dtype)
        self._head = linear_of(model, anatomy.head)
        self._rotations = Rotations(model, anatomy)
        self._layers = [_LayerParts.of(model, layer, self._dtype, self._chosen) for layer in anatomy.layers]
        self._mixers = [_mixer(model, layer.attention, batch, self._dtype) for layer in anatomy.layers]
        self._beside = [_mixer(model, layer.beside, batch, self._dtype) for layer in anatomy.layers]
        self._latents = [
            _latent(model, layer.attention, batch, capacity, self._embedding) for layer in anatomy.layers
        ]
        self._inputs = None
        if anatomy.layer_inputs is not None:
            self._inputs = layer_inputs_of(model, anatomy.layer_inputs, self._dtype)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        for layer in anatomy.layers:
            shared = layer.attention.shared if isinstance(layer.attention, Attention) else None
            keys = self._cache(layer.attention, device) if shared is None else self._keys[shared]
            self._keys.append(keys)
            self._values.append(torch.zeros_like(keys) if shared is None else self._values[shared])
        self._rows = torch.arange(batch, device=device)
        self._places = torch.arange(capacity, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._shortest = self._longest = 0
        self.most_verified = MOST_VERIFIED if batch == 1 else 0
        self.verification_cost = _VERIFICATION_COST
        # The states of each mixer behind each token of the last verification, until some of them are kept.
        self._verified: dict[MixerLayer, list[tuple[Tensor, ...]]] = {}
        if keeps_hidden:
            shape = (capacity, self._embedding.shape[1])
            self.hidden_states = torch.zeros(shape, dtype=self._dtype, device=device)
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
        vectors = self._vectors(ids, x)
        turns = self._rotations.at(positions)
        for index, parts in enumerate(self._layers):
            self._routing = index
            beside = self._prompt_mixer(self._beside[index])
            x = parts.forward(x, self._prompt_attention(index, parts, turns), beside, vectors[index])
            if self.observe is not None:
                self.observe(index, x)
        last = x[self._rows, self.lengths.long() - 1]
        if self.hidden_states is None:
            return self._logits(self._normed(last))
        normed = self._normed(x)
        self.hidden_states[:width] = normed[0]
        return self._logits(normed[self._rows, self.lengths.long() - 1])

    def keep(self, length: int) -> None:
        """As in :class:`Forward`."""
        super().keep(length)
        self._shortest = self._longest = length

    def accept(self, length: int) -> None:
        """As in :class:`Forward`."""
        for mixer, states in self._verified.items():
            mixer.restore(states[length - self._longest - 1])
        self._verified.clear()
        self.keep(length)

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
        vectors = self._vectors(tokens[:, None], x)
        turns = self._rotations.at(positions[:, None])
        masks: dict[int | None, tuple[int, Tensor | None]] = {}
        for index, parts in enumerate(self._layers):
            self._routing = index
            mixer = self._mixers[index]
            if mixer is not None:
                x = parts.forward(x, mixer.step, None, vectors[index])
            elif parts.layer.attention is None:
                x = parts.forward(x, None, None, vectors[index])
            else:
                window = parts.window
                if window not in masks:
                    masks[window] = self._visible(positions, window)
                beside = self._beside[index]
                attend = self._step_attention(index, parts, turns, positions, *masks[window])
                x = parts.forward(x, attend, None if beside is None else beside.step, vectors[index])
            if self.observe is not None:
                self.observe(index, x)
        normed = self._normed(x[:, 0])
        if self.hidden_states is not None:
            self.hidden_states[self._longest] = normed[0]
        self._shortest += 1
        self._longest += 1
        self.lengths += 1
        return self._logits(normed)

    def verify(self, tokens: Tensor) -> Tensor:
        """As in :class:`Forward`.

        Raises:
            ValueError: the batch is not 1, or the cache has no room for all.
        """
        with torch.inference_mode():
            logits = self._logits(self._run(tokens))
        return logits.clone()

    def _run(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` as :meth:`verify`; returns the hidden states behind the final norm, [R,
        hidden]."""
        start, end = self._longest, self._longest + len(tokens)
        if self.batch != 1 or end > self.capacity:
            raise ValueError(f"{end} tokens of {self.batch} rows: expected at most {self.capacity} of one")
        self._verified.clear()
        positions = self._places[start:end]
        x = self._embed(tokens[None], positions)
        vectors = self._vectors(tokens[None], x)
        turns = self._rotations.at(positions)
        for index, parts in enumerate(self._layers):
            beside = self._run_mixer(self._beside[index])
            attend = self._run_attention(index, parts, turns, start)
            x = parts.forward(x, attend, beside, vectors[index])
        normed = self._normed(x[0])
        if self.hidden_states is not None:
            self.hidden_states[start:end] = normed
        return normed

    def _run_mixer(self, mixer: MixerLayer | None) -> Function | None:
        """A recurrent mixer's step for each token of a run, whose states are kept."""
        if mixer is None:
            return None

        def mix(x: Tensor) -> Tensor:
            before, mixed, behind = mixer.states(), [], []
            for place in range(x.shape[1]):
                mixed.append(mixer.step(x[:, place : place + 1]))
                behind.append(mixer.states())
            mixer.restore(before)
            self._verified[mixer] = behind
            return torch.cat(mixed, 1)

        return mix

    def _embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(ids, self._embedding)
        if self.anatomy.embedding_scale != 1:
            x = x * self.anatomy.embedding_scale
        if self._positions is not None:
            x = x + F.embedding(positions + self.anatomy.positions_offset, self._positions)
        return x if self._embedding_norm is None else self._embedding_norm(x)

    def _vectors(self, ids: Tensor, x: Tensor) -> Sequence[Tensor | None]:
        """The vector [B, T, P] of each layer for tokens with embeddings x; None for all without any."""
        if self._inputs is None:
            return [None] * len(self._layers)
        return self._inputs(ids, x).unbind(-2)

    def _normed(self, x: Tensor) -> Tensor:
        return x if self._final_norm is None else self._final_norm(x)

    def _logits(self, normed: Tensor) -> Tensor:
        logits = self._head(normed)
        if self.anatomy.logit_scale != 1:
            logits = logits * self.anatomy.logit_scale
        return capped(logits, self.anatomy.logit_softcap)

    def _prompt_mixer(self, mixer: MixerLayer | None) -> Function | None:
        return None if mixer is None else lambda x: mixer.prompts(x, self.lengths)

    def _prompt_attention(self, index: int, parts: _LayerParts, turns: Turns) -> Function | None:
        mixer = self._prompt_mixer(self._mixers[index])
        if mixer is not None:
            return mixer
        latent = self._latents[index]
        if latent is not None:
            return lambda x: latent.prompts(x, _turn(latent, turns))
        if parts.layer.attention is None:
            return None

        def attend(x: Tensor) -> Tensor:
            q, new, factors = parts.heads(x, turns)
            keys, values = (cache[index][:, :, : x.shape[1]] for cache in (self._keys, self._values))
            if new is not None:
                keys.copy_(new[0].transpose(1, 2))
                values.copy_(new[1].transpose(1, 2))
            mixed = causal_attention(q.transpose(1, 2), keys, values, parts.attention, parts.sinks)
            return _gated(mixed.transpose(1, 2), factors)

        return attend

    def _step_attention(
        self,
        index: int,
        parts: _LayerParts,
        turns: Turns,
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
                return latent.step(x, _turn(latent, turns), positions, end, mask)

        def attend(x: Tensor) -> Tensor:
            q, new, factors = parts.heads(x, turns)
            keys, values = self._keys[index], self._values[index]
            for cache, rows in zip((keys, values), new or (), strict=False):
                if self._shortest == self._longest:
                    cache[:, :, self._longest] = rows[:, 0]
                else:
                    cache[self._rows, :, positions] = rows[:, 0]
            seen = keys[:, :, first:end]
            with threads_at_most(1 if seen.is_cpu and seen.numel() <= _ALONE else None):
                mixed = one_query(q, seen, values[:, :, first:end], mask, parts.attention, parts.sinks)
            return _gated(mixed, factors)

        return attend if latent is None else attend_latents

    def _run_attention(self, index: int, parts: _LayerParts, turns: Turns, start: int) -> Function | None:
        """Attention of neighbouring tokens of one row, the first of them at position ``start``, or what
        stands in its place; None in a layer without either."""
        if parts.layer.attention is None:
            return None
        if self._mixers[index] is not None:
            return self._run_mixer(self._mixers[index])
        keys, values, window = self._keys[index], self._values[index], parts.window
        latent = self._latents[index]

        def attend_latents(x: Tensor) -> Tensor:
            assert latent is not None
            end = start + x.shape[1]
            mask = self._places[:end] <= self._places[start:end, None]
            return latent.run(x, _turn(latent, turns), start, mask)

        def attend(x: Tensor) -> Tensor:
            q, new, factors = parts.heads(x, turns)
            end = start + x.shape[1]
            if new is not None:
                keys[:, :, start:end] = new[0].transpose(1, 2)
                values[:, :, start:end] = new[1].transpose(1, 2)
            first = 0 if window is None else max(0, start + 1 - window)
            query, place = self._places[start:end, None], self._places[first:end]
            mask = place <= query
            if window is not None:
                mask &= place > query - window
            seen = keys[:, :, first:end], values[:, :, first:end]
            mixed = masked(q.transpose(1, 2), *seen, mask=mask, attention=parts.attention, sinks=parts.sinks)
            return _gated(mixed.transpose(1, 2), factors)

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


@dataclass(frozen=True, eq=False)
class _LayerParts:
    """Functions for a layer's modules, None for parts that it lacks; of a recurrent mixer only the
    projections around it."""

    layer: Layer
    attention_norm: Function | None
    post_attention_norm: Function | None
    mlp_norm: Function | None
    post_mlp_norm: Function | None
    query_norm: Function | None
    key_norm: Function | None
    value_norm: Function | None
    qkv: Callable[[Tensor], Sequence[Tensor]] | None
    gate: Function | None
    output: Function | None
    beside_output: Function | None
    mlp: Callable[[Tensor, Tensor], Tensor] | None
    input_gate: Callable[[Tensor, Tensor], Tensor] | None
    sinks: Tensor | None
    stream_scale: Tensor | None

    @classmethod
    def of(cls, model: nn.Module, layer: Layer, dtype: torch.dtype, chosen: Chosen) -> _LayerParts:
        attention = layer.attention
        norms: tuple[Norm | None, ...] = (None, None, None)
        sinks = None
        if isinstance(attention, Attention):
            norms = attention.query_norm, attention.key_norm, attention.value_norm
            sinks = attention_sinks(model, attention)
        return cls(
            layer=layer,
            attention_norm=norm_of(model, layer.attention_norm, dtype),
            post_attention_norm=norm_of(model, layer.post_attention_norm, dtype),
            mlp_norm=norm_of(model, layer.mlp_norm, dtype),
            post_mlp_norm=norm_of(model, layer.post_mlp_norm, dtype),
            query_norm=norm_of(model, norms[0], dtype),
            key_norm=norm_of(model, norms[1], dtype),
            value_norm=norm_of(model, norms[2], dtype),
            qkv=parts_of(model, attention.qkv) if isinstance(attention, Attention) else None,
            gate=gate_of(model, attention.gate) if isinstance(attention, Attention) else None,
            output=None if attention is None else linear_of(model, attention.output),
            beside_output=None if layer.beside is None else linear_of(model, layer.beside.output),
            mlp=None if layer.mlp is None else _mlp_of(model, layer.mlp, chosen, dtype),
            input_gate=None if layer.input_gate is None else input_gate_of(model, layer.input_gate, dtype),
            sinks=sinks,
            stream_scale=None if layer.stream_scale is None else model.get_buffer(layer.stream_scale).clone(),
        )

    @property
    def attention(self) -> Attention:
        assert isinstance(self.layer.attention, Attention)
        return self.layer.attention

    @property
    def window(self) -> int | None:
        """Positions that a query sees at most; None for all."""
        return self.layer.attention.window if isinstance(self.layer.attention, Attention) else None

    def forward(
        self, x: Tensor, attend: Function | None, beside: Function | None, vector: Tensor | None
    ) -> Tensor:
        """x [B, T, hidden] through the block; ``attend`` makes [B, T, H, D] of normalised hidden states, None
        in a layer without attention, and so does ``beside`` for the mixer beside attention. ``vector``
        [B, T, P] is the layer's own input, or None."""
        x = self._parts(x, attend, beside)
        if self.input_gate is not None and vector is not None:
            x = x + self.input_gate(x, vector)
        return x if self.stream_scale is None else x * self.stream_scale

    def _parts(self, x: Tensor, attend: Function | None, beside: Function | None) -> Tensor:
        """x behind attention and MLP."""
        layer = self.layer
        if attend is not None and self.output is not None:
            normed = x if self.attention_norm is None else self.attention_norm(x)
            a = self.output(attend(normed).flatten(-2))
            if self.post_attention_norm is not None:
                a = self.post_attention_norm(a)
            if layer.parallel:
                shared = layer.mlp_norm == layer.attention_norm
                m = self._mlp(normed if shared else x if self.mlp_norm is None else self.mlp_norm(x), x)
                return x.add(a + m, alpha=layer.attention_scale)
            x = x.add(a, alpha=layer.attention_scale)
            if beside is not None and self.beside_output is not None:
                x = x.add(self.beside_output(beside(normed).flatten(-2)), alpha=layer.beside_scale)
        if self.mlp is None:
            return x
        return x.add(self._mlp(x if self.mlp_norm is None else self.mlp_norm(x), x), alpha=layer.mlp_scale)

    def _mlp(self, normed: Tensor, x: Tensor) -> Tensor:
        assert self.mlp is not None
        m = self.mlp(normed, x)
        return m if self.post_mlp_norm is None else self.post_mlp_norm(m)

    def heads(self, x: Tensor, turns: Turns) -> tuple[Tensor, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Rotated queries [B, T, H, D]; rotated keys and values [B, T, KV, D], None in a layer that reads
        another layer's; and factors of the result, [B, T, H, D] or [B, T, H, 1], or None."""
        attention = self.attention
        assert self.qkv is not None
        q, *others = self.qkv(x)
        factors = None if self.gate is None else _heads(self.gate(x), attention.heads)
        if attention.gated:
            q, gate = q.reshape(*q.shape[:-1], attention.heads, 2, -1).unbind(-2)
            q, factors = q.flatten(-2), torch.sigmoid(gate)
        if not others:
            return self._turned_queries(q, turns), None, factors
        v = _by_head(others[-1], attention.kv_heads, attention.value_norm, self.value_norm)
        counts = [attention.heads, attention.kv_heads]
        if attention.norms_behind:
            q, k = (_heads(part, count) for part, count in zip((q, others[0]), counts, strict=True))
        else:
            q = _by_head(q, attention.heads, attention.query_norm, self.query_norm)
            k = _by_head(others[0], attention.kv_heads, attention.key_norm, self.key_norm)
        q, k = torch.split(_turned(torch.cat((q, k), -2), attention, turns), counts, -2)
        if attention.norms_behind:
            q, k = _normed(q, self.query_norm), _normed(k, self.key_norm)
        return q, (k, v), factors

    def _turned_queries(self, q: Tensor, turns: Turns) -> Tensor:
        """Queries [..., H * D] by head, normalised and rotated, without keys beside them."""
        attention = self.attention
        if attention.norms_behind:
            return _normed(_turned(_heads(q, attention.heads), attention, turns), self.query_norm)
        return _turned(_by_head(q, attention.heads, attention.query_norm, self.query_norm), attention, turns)


def _turn(latent: LatentLayer, turns: Turns) -> Turn:
    rotary = latent.attention.rotary
    return None if rotary is None else turns[rotary]


def _turned(heads: Tensor, attention: Attention, turns: Turns) -> Tensor:
    """``heads`` [..., heads, D], rotated as the attention's queries and keys are."""
    if attention.rotary is None:
        return heads
    cosines, sines, partner = turns[attention.rotary]
    turned = heads * cosines
    turned.addcmul_(heads.index_select(-1, partner).to(turned.dtype), sines)
    return turned.to(heads.dtype)


def _mlp_of(
    model: nn.Module, mlp: MLP | Mixture, chosen: Chosen, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Tensor]:
    """The MLP as a function of its normed input and of the residual stream before that norm."""
    if isinstance(mlp, Mixture):
        return mixture_of(model, mlp, chosen, dtype)
    run = mlp_of(model, mlp)
    return lambda normed, _: run(normed)


def _gated(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x * factors


def _normed(heads: Tensor, normalise: Function | None) -> Tensor:
    """``heads`` [..., heads, D], each normalised."""
    return heads if normalise is None else normalise(heads)


def _mixer(model: nn.Module, mixer: Mixing, batch: int, dtype: torch.dtype) -> MixerLayer | None:
    """The recurrent mixer or gated convolution in the place of attention, or None."""
    if isinstance(mixer, GatedConvolution):
        return ConvolutionLayer(model, mixer, parts_of(model, mixer.inputs), batch, dtype)
    if isinstance(mixer, Mamba):
        return MambaLayer(model, mixer, parts_of(model, mixer.inputs), batch, dtype)
    if not isinstance(mixer, DeltaNet):
        return None
    channels = mixer.channels
    second = (
        None if channels is None else (linear_of(model, channels.steps), linear_of(model, channels.gates))
    )
    norm = norm_of(model, mixer.norm, dtype if channels is None else torch.float32)
    assert norm is not None
    inputs, rates = parts_of(model, mixer.inputs), parts_of(model, mixer.rates)
    return DeltaLayer(model, mixer, inputs, rates, norm, batch, dtype, second)


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
    norm = norm_of(model, attention.latent_norm, like.dtype)
    assert norm is not None
    query = () if attention.query is None else (linear_of(model, attention.query),)
    query_norm = norm_of(model, attention.query_norm, like.dtype)
    return LatentLayer(
        model,
        attention,
        inputs=parts_of(model, attention.inputs),
        query=query if query_norm is None else (query_norm, *query),
        latent_norm=norm,
        expansion=linear_of(model, attention.expansion),
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
