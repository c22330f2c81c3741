"""Walk through the layers of a forward, launching their kernels in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from marlinq.kernels import step as kernels
from marlinq.kernels.experts import ExpertWeights, routed_experts
from marlinq.kernels.step import ROUTER_WIDEST, Addition, Gather, Prepared, RoutedRows, RowNorm
from marlinq.models.anatomy import Anatomy, Groups
from marlinq.runtime.step.bound import (
    BoundConvolution,
    BoundDelta,
    BoundLatent,
    BoundLayer,
    BoundMamba,
    BoundMixer,
    BoundMixture,
    BoundMLP,
)
from marlinq.runtime.step.bound_forward import BoundForward
from marlinq.runtime.step.latent_prompts import append_latents
from marlinq.runtime.step.mixer_prompts import read_convolution, read_delta, read_mamba
from marlinq.runtime.step.products import Product

# Rows up to which the router's kernel also adds and normalises its input, which every block of a row repeats.
_JOINED_ROWS = 64


@dataclass(frozen=True)
class Pending:
    """Results of products that the next kernel adds to the residual stream.

    Attributes:
        first, second, post, factor, gates, scale, own: as in :func:`marlinq.kernels.step.residual`.
    """

    first: Tensor | RoutedRows
    second: Tensor | None
    post: RowNorm | None
    factor: float
    gates: Tensor | None = None
    scale: float = 1.0
    own: tuple[RowNorm, RowNorm] | None = None

    def select(self, rows: Tensor) -> Pending:
        if isinstance(self.first, RoutedRows):
            raise TypeError("rows of experts are summed by the next kernel, all of them")
        second = None if self.second is None else self.second.index_select(0, rows)
        gates = None if self.gates is None else self.gates.index_select(0, rows)
        return replace(self, first=self.first.index_select(0, rows), second=second, gates=gates)


@dataclass(frozen=True)
class Chosen:
    """The experts that a router has chosen for each row.

    Attributes:
        ids: indices of the experts, int32 [M, top].
        weights: factors of the experts, float32 [M, top].
        gates: factor of a shared expert, float32 [M, 1]; None for 1.
        shared: weights of a shared expert that is stored as further experts, which ``ids`` has for every row;
            or None.
    """

    ids: Tensor
    weights: Tensor
    gates: Tensor | None
    shared: ExpertWeights | None = None


def finish(logits: Tensor, anatomy: Anatomy) -> Tensor:
    """Apply the head's scale and soft cap to ``logits``, in place."""
    if anatomy.logit_scale != 1:
        logits.mul_(anatomy.logit_scale)
    if anatomy.logit_softcap is not None:
        logits.div_(anatomy.logit_softcap).tanh_().mul_(anatomy.logit_softcap)
    return logits


class Walk:
    """A pass of some rows through the layers, which launches each kernel when it comes to it.

    Between attentions it keeps only the residual stream, and what parallel blocks or delta nets need beside
    it.

    Args:
        forward: owner of the layers.
        tokens: int64 [M]; M = b * T.
        part: the b sequences of the batch.
        tokens_each: T.
        lengths: int32 [b], tokens before these; None for the cache's lengths.
    """

    def __init__(
        self,
        forward: BoundForward,
        tokens: Tensor,
        part: slice,
        tokens_each: int,
        lengths: Tensor | None = None,
    ) -> None:
        self.forward = forward
        self.tokens = tokens
        self.part = part
        self.tokens_each = tokens_each
        self.lengths = forward.lengths[part] if lengths is None else lengths
        self._begun = False
        self._x: Tensor | Gather = self.embedded()
        self._pending: Pending | None = None
        # Normalised input that attention and MLP of a parallel block share.
        self._both: Tensor | None = None
        # Input of a delta net's betas and steps.
        self._rates_input: Tensor | None = None
        # Inputs of a mixer beside attention, and then its results.
        self._beside: Tensor | None = None
        # Vectors that input gates read, of all layers.
        self._vectors: Tensor | None = None

    # Methods that a recorded step overrides (marlinq.runtime.step.recorded_step).

    def empty(self, name: str, rows: int, columns: int) -> Tensor:
        """Memory [rows, columns]; may reuse earlier memory of the same name."""
        return torch.empty((rows, columns), dtype=self.forward.dtype, device=self.lengths.device)

    def launch(self, prepared: Prepared) -> None:
        """Launch a kernel between products.

        The first kernel of a step waits for the whole step before: attention reads lengths, and keys and
        values of earlier tokens, without waiting for the kernels before it.
        """
        kernels.bind(prepared, self.forward.device_index, dependent=self._begun).start()
        self._begun = True

    def multiply(self, name: str, product: Product, x: Tensor) -> Tensor:
        """[M, columns of the product]."""
        return product.run(x)

    def activated(self, mlp: BoundMLP, normed: Tensor) -> Tensor:
        """The input of an MLP's second product, [M, inner columns], padded where gate and up alternate."""
        x = self.multiply("inputs", mlp.inputs, normed)
        # With padding of whole tiles, or without.
        columns = x.shape[1] // 2 if mlp.arrangement == "tiles" else mlp.anatomy.inputs.widths[0]
        active = self.empty("active", x.shape[0], columns)
        anatomy = mlp.anatomy
        self.launch(kernels.activate(x, active, anatomy.activation, mlp.arrangement, anatomy.gate_scale))
        return active

    def whole(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Contiguous memory [rows, columns] of any dtype, as :meth:`empty`."""
        return torch.empty((rows, columns), dtype=dtype, device=self.lengths.device)

    def shared_experts(self, mixture: BoundMixture, normed: Tensor) -> ExpertWeights | None:
        """Weights of the shared expert as further experts, which the router takes for every row of
        ``normed``; None where the shared expert has launches of its own."""
        return None

    def experts(
        self, mixture: BoundMixture, x: Tensor, chosen: Chosen, *, summed: bool = False
    ) -> Tensor | RoutedRows:
        """The results of the chosen experts for each row, a tensor if ``summed``."""
        grouped = mixture.experts
        return routed_experts(x, chosen.ids, chosen.weights, grouped.weights, grouped.activation)

    def observed(self, index: int, x: Tensor) -> None:
        """Call ``observe`` with the hidden states behind a layer."""
        observe = self.forward.observe
        if observe is not None:
            observe(index, x.view(-1, self.tokens_each, self.forward.hidden))

    # The walk itself.

    def embedded(self) -> Gather:
        """The embeddings, input of the first layer."""
        forward = self.forward
        return Gather(
            self.tokens,
            forward.embedding,
            forward.anatomy.embedding_scale,
            forward.places,
            forward.anatomy.positions_offset,
        )

    def layers(self) -> tuple[Tensor, Pending]:
        """The residual stream behind the last layer, and what is still to be added to it; T is 1."""
        for index, layer in enumerate(self.forward.layers):
            if layer.qkv is None:
                self.without_attention(index)
            else:
                self.after_attention(index, self._attend(index, self.before_attention(index)))
        return self.end()

    def before_attention(self, index: int) -> Tensor:
        """Queries, keys and values of a layer, or a mixer's inputs: [M, columns of the product]."""
        layer = self.forward.layers[index]
        assert layer.qkv is not None
        normed = self._enter(index, layer.attention_norm)
        anatomy = layer.anatomy
        if anatomy.parallel and anatomy.mlp_norm == anatomy.attention_norm:
            self._both = normed
        if isinstance(layer.mixer, BoundDelta):
            self._rates_input = normed
        if layer.beside is not None:
            self._beside = self.multiply("beside", layer.beside.inputs, normed)
        return self.multiply("qkv", layer.qkv, normed)

    def without_attention(self, index: int) -> None:
        """Pass a layer that is an MLP alone."""
        layer = self.forward.layers[index]
        given, shared, gates = self._mlp(index, layer, self._enter(index, layer.mlp_norm))
        self._leave(index, Pending(given, shared, layer.post_mlp_norm, layer.anatomy.mlp_scale, gates))

    def _leave(self, index: int, pending: Pending) -> None:
        """End a layer; ``pending`` are results of its attention and MLP that are not added yet."""
        layer = self.forward.layers[index]
        gate = layer.input_gate
        if gate is not None:
            assert self._vectors is not None
            self._x, x = self.add(self._x, pending, None)
            width = self._vectors.shape[1] // len(self.forward.layers)
            vector = self._vectors[:, index * width : (index + 1) * width]
            opened = self.multiply("gate", gate.gate, x)[:, :width]
            active = self.empty("gated", x.shape[0], width)
            self.launch(kernels.activate(opened, active, gate.anatomy.activation, "apart", up=vector))
            pending = Pending(self.multiply("gate output", gate.output, active), None, gate.norm, 1.0)
        self._pending = replace(pending, scale=layer.stream_scale)

    def _make_vectors(self, x: Tensor) -> None:
        """The vectors of all layers, from embeddings x [M, hidden]."""
        inputs = self.forward.layer_inputs
        if inputs is None:
            return
        projected = self.multiply("layer projection", inputs.projection, x)
        self._vectors = self.empty("layer inputs", x.shape[0], inputs.columns)
        self.launch(kernels.layer_inputs(self.tokens, projected, self._vectors, inputs.weights))

    def _enter(self, index: int, norm: RowNorm | None) -> Tensor:
        """The normed input of a layer, after pending results were added to the residual stream."""
        if not index and self.forward.embedding_norm is not None:
            _, self._x = self.add(self._x, None, self.forward.embedding_norm)
        x, normed = self.add(self._x, self._pending, norm)
        self._x, self._pending = x, None
        if index:
            self.observed(index - 1, x)
        else:
            self._make_vectors(x)
        return normed

    def after_attention(self, index: int, attended: Tensor) -> None:
        """The rest of the layer, from attention's results [M, H * D]."""
        layer = self.forward.layers[index]
        factor, mlp_factor = layer.anatomy.attention_scale, layer.anatomy.mlp_scale
        assert layer.output is not None
        mixed = self.multiply("output", layer.output, attended)
        beside = None
        if layer.beside is not None and self._beside is not None:
            beside, self._beside = self.multiply("beside output", layer.beside.output, self._beside), None
        if layer.mlp is None:
            self._leave(index, Pending(mixed, beside, layer.post_attention_norm, factor))
            return
        if layer.anatomy.parallel:
            normed = self._both
            if normed is None:
                _, normed = self.add(self._x, None, layer.mlp_norm)
            self._both = None
            # A shared expert in a parallel block is refused.
            given = self._mlp(index, layer, normed)[0]
            assert isinstance(given, Tensor)
            self._leave(index, Pending(mixed, given, None, factor))
            return
        pending = Pending(mixed, beside, layer.post_attention_norm, factor)
        routed = isinstance(layer.mlp, BoundMixture) and layer.mlp.norm is None
        if routed and self._router_adds(pending, layer.mlp_norm):
            assert isinstance(layer.mlp, BoundMixture)
            normed = self.empty("normed", mixed.shape[0], self.forward.hidden)
            chosen = self._choose(index, layer.mlp, normed, pending, layer.mlp_norm)
            given, shared = self._mixture(layer.mlp, normed, chosen)
            self._leave(index, Pending(given, shared, layer.post_mlp_norm, mlp_factor, chosen.gates))
            return
        further = self._norms_apart(layer, mixed.shape[0])
        self._x, normed = self.add(self._x, pending, layer.mlp_norm, further=further)
        del mixed, beside, pending, further  # the widest tensors come now
        given, shared, gates = self._mlp(index, layer, normed)
        own = layer.mlp.own_norms if isinstance(layer.mlp, BoundMixture) else None
        self._leave(index, Pending(given, shared, layer.post_mlp_norm, mlp_factor, gates, own=own))

    def end(self) -> tuple[Tensor, Pending]:
        """The residual stream behind the last layer, and what is still to be added to it."""
        x, pending = self._x, self._pending
        if isinstance(x, Gather) or pending is None:
            raise ValueError("a model without layers")
        if self.forward.observe is not None:
            self.observed(len(self.forward.layers) - 1, self.add(x, pending, None)[0])
        return x, pending

    def add(
        self,
        source: Tensor | Gather,
        pending: Pending | None,
        norm: RowNorm | None,
        counter: Tensor | None = None,
        kept: Tensor | None = None,
        further: Sequence[tuple[RowNorm, Tensor]] = (),
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after adding ``pending``, and its normalisation; the stream twice without
        ``norm``. ``counter`` and ``kept`` are those of :func:`marlinq.kernels.step.residual`; ``further``
        are more norms of the stream, and memory for their results."""
        forward = self.forward
        if isinstance(source, Tensor) and pending is None and norm is None:
            return source, source
        rows = source.shape[0] if isinstance(source, Tensor) else source.tokens.shape[0]
        stored = out = None
        if pending is not None or isinstance(source, Gather):
            stored = self.empty("residual", rows, forward.hidden)
        if norm is not None:
            out = self.empty("normed", rows, forward.hidden)
        self.launch(
            kernels.residual(
                source,
                stored=stored,
                out=out,
                norm=norm,
                first=None if pending is None else pending.first,
                second=None if pending is None else pending.second,
                gates=None if pending is None else pending.gates,
                own=None if pending is None else pending.own,
                post=None if pending is None else pending.post,
                further=further,
                factor=1.0 if pending is None else pending.factor,
                scale=1.0 if pending is None else pending.scale,
                lengths=self.lengths,
                tokens_each=self.tokens_each,
                counter=counter,
                kept=kept,
            )
        )
        x = source if stored is None else stored
        assert isinstance(x, Tensor)
        return x, x if out is None else out

    def _attend(self, index: int, joined: Tensor) -> Tensor:
        """The new tokens appended, and their attention: [M, columns of the product] to [M, H * D]."""
        forward, layer = self.forward, self.forward.layers[index]
        if isinstance(layer.mixer, BoundDelta):
            return self._delta(layer.mixer, joined)
        if isinstance(layer.mixer, BoundConvolution):
            return self._convolution(layer.mixer, joined)
        if layer.mixer is not None:
            return self._mamba(layer.mixer, joined)
        if layer.latent is not None:
            return self._latent(index, layer.latent, joined)
        self.mix_beside(index)
        attention = layer.attention
        out = self.empty("attended", joined.shape[0], attention.heads * attention.head_dim)
        self.launch(
            kernels.attend(
                joined,
                layer.keys[self.part],
                layer.values[self.part],
                out.view(-1, attention.heads, attention.head_dim),
                self.lengths,
                layer.heads,
                forward.workspace,
                scale=attention.scale,
                division=forward.divisions[index],
                window=attention.window,
                softcap=attention.softcap,
                sinks=layer.sinks,
                together=forward.together,
            )
        )
        return out

    def _delta(self, delta: BoundDelta, joined: Tensor) -> Tensor:
        """The results of a delta net, [M, value heads * value channels]."""
        rates = self._take_rates(delta, made=delta.weights.rates is not None)
        out = self.empty("attended", joined.shape[0], delta.net.value_heads * delta.net.value_dim)
        behind, second = self.forward.states_behind, self._second_projections(delta, joined)
        if behind is not None:
            states = delta.behind(behind)
            work = kernels.delta(
                *(joined, rates, out, delta.ring, delta.state, self.lengths, delta.weights),
                states=states,
                second=second,
            )
        else:
            ring, state = delta.ring[self.part], delta.state[self.part]
            work = kernels.delta(joined, rates, out, ring, state, self.lengths, delta.weights, second=second)
        self.launch(work)
        return out

    def _second_projections(self, delta: BoundDelta, joined: Tensor) -> tuple[Tensor, Tensor] | None:
        """Steps by channel and gates of a delta net, [M, columns] each; None in a net without decays by
        channel."""
        if delta.second is None:
            return None
        *_, few_steps, few_gates = delta.net.inputs.split(joined[:, : sum(delta.net.inputs.widths)])
        names = "channel steps", "channel gates"
        steps, gates = (
            self.multiply(name, product, x)[:, : product.features]
            for name, product, x in zip(names, delta.second, (few_steps, few_gates), strict=True)
        )
        return steps, gates

    def _take_rates(self, delta: BoundDelta, *, made: bool) -> Tensor:
        """Betas and steps of a delta net, or their projections' input if its kernel has these projections
        (``made``)."""
        assert self._rates_input is not None
        given, self._rates_input = self._rates_input, None
        return given if made else self.multiply("rates", delta.rates, given)

    def _convolution(self, bound: BoundConvolution, joined: Tensor) -> Tensor:
        """The results of a gated convolution, [M, channels]."""
        out = self.empty("attended", joined.shape[0], bound.weights.channels)
        self.launch(
            kernels.gated_convolution(joined, out, bound.ring[self.part], self.lengths, bound.weights)
        )
        return out

    def latent_queries(self, latent: BoundLatent, joined: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [M, H * (plain and rotated channels)] before their rotation, and latents with rotated keys
        [M, width] before norm and rotation."""
        widths = latent.attention.inputs.widths
        q, rows = joined[:, : widths[0]], joined[:, widths[0] : sum(widths)]
        if latent.query_norm is not None:
            normed = self.empty("compressed", joined.shape[0], widths[0])
            self.launch(kernels.residual(q, out=normed, norm=latent.query_norm))
            q = normed
        if latent.query is not None:
            q = self.multiply("queries", latent.query, q)[:, : latent.query.features]
        return q, rows

    def _latent(self, index: int, latent: BoundLatent, joined: Tensor) -> Tensor:
        """The new rows of the cache appended, and latent attention: [M, columns] to [M, H * V]."""
        forward, weights, rows = self.forward, latent.weights, joined.shape[0]
        workspace, division = forward.latent_workspace, forward.latent_divisions[index]
        assert workspace is not None
        q, new = self.latent_queries(latent, joined)
        cache = latent.cache[self.part]
        used = rows * weights.heads * weights.width
        queries = workspace.queries[:used].view(rows, weights.heads, weights.width)
        self.launch(kernels.latent_queries(q, new, cache, self.lengths, weights, queries))
        self.launch(
            kernels.latent_attend(
                *(queries, cache, self.lengths, weights, workspace),
                scale=latent.attention.scale,
                division=division,
            )
        )
        out = self.empty("attended", rows, weights.heads * weights.value_dim)
        self.launch(
            kernels.latent_values(
                out, self.lengths, weights, workspace, capacity=cache.shape[1], division=division
            )
        )
        return out

    def append_latents(self, latent: BoundLatent, joined: Tensor, start: int) -> Tensor:
        """The rows of prompts' tokens from position ``start`` on put into the cache, and their rotated
        queries [M, H, plain and rotated channels]."""
        q, rows = self.latent_queries(latent, joined)
        return append_latents(latent, q, rows, self.part, start, self.tokens_each)

    def _mamba(self, bound: BoundMamba, joined: Tensor) -> Tensor:
        """The results of a Mamba-2 mixer, [M, width]."""
        out = self.empty("attended", joined.shape[0], bound.mixer.width)
        ring, state = bound.ring[self.part], bound.state[self.part]
        workspace = self.forward.mamba_workspace
        self.launch(kernels.mamba(joined, out, ring, state, self.lengths, bound.weights, workspace))
        return out

    def mix_beside(self, index: int, start: int = 0, ends: Tensor | None = None) -> None:
        """Run the mixer beside a layer's attention, if there is one: for a new token, or for prompts' tokens
        from position ``start`` on as :meth:`read_mixer`."""
        beside = self.forward.layers[index].beside
        if beside is None:
            return
        assert self._beside is not None
        if ends is None:
            self._beside = self._mamba(beside.mixer, self._beside)
        else:
            self._beside = self.read_mixer(beside.mixer, self._beside, start, ends)

    def read_mixer(self, mixer: BoundMixer, joined: Tensor, start: int, ends: Tensor) -> Tensor:
        """The results of a mixer for prompts' tokens from position ``start`` on; ``ends`` [b] are
        the tokens of each prompt."""
        rows, each = joined.shape[0] // self.tokens_each, self.tokens_each
        given = joined.reshape(rows, each, -1)
        if isinstance(mixer, BoundMamba):
            return read_mamba(mixer, given, self.part, start, ends).flatten(0, 1)
        if isinstance(mixer, BoundConvolution):
            return read_convolution(mixer, given, self.part, start, ends).flatten(0, 1)
        rates = self._take_rates(mixer, made=False).reshape(rows, each, -1)
        made = self._second_projections(mixer, joined)
        second = None
        if made is not None:
            second = made[0].reshape(rows, each, -1), made[1].reshape(rows, each, -1)
        return read_delta(mixer, given, rates, self.part, start, ends, second).flatten(0, 1)

    def append(self, index: int, joined: Tensor, q: Tensor) -> None:
        """The new tokens' keys and values put into the cache, and their queries into ``q`` [M, H * D]."""
        layer = self.forward.layers[index]
        attention = layer.attention
        queries = q.view(-1, attention.heads, attention.head_dim)
        keys, values = layer.keys[self.part], layer.values[self.part]
        self.launch(
            kernels.append(
                joined, queries, keys, values, self.lengths, layer.heads, tokens_each=self.tokens_each
            )
        )

    def _mlp(
        self, index: int, layer: BoundLayer, normed: Tensor
    ) -> tuple[Tensor | RoutedRows, Tensor | None, Tensor | None]:
        """(results of the MLP or of a mixture's experts, those of the shared expert, and the shared expert's
        factor for each row); None for what the layer does not have."""
        if isinstance(layer.mlp, BoundMLP):
            return self._dense(layer.mlp, normed), None, None
        assert layer.mlp is not None
        if layer.mlp.norm is not None:
            return *self._mixture_apart(index, layer.mlp, normed), None
        chosen = self._choose(index, layer.mlp, normed)
        return *self._mixture(layer.mlp, normed, chosen), chosen.gates

    def _dense(self, mlp: BoundMLP, normed: Tensor) -> Tensor:
        return self.multiply("down", mlp.down, self.activated(mlp, normed))

    def _mixture(
        self, mixture: BoundMixture, normed: Tensor, chosen: Chosen
    ) -> tuple[Tensor | RoutedRows, Tensor | None]:
        shared = None
        if mixture.shared is not None and chosen.shared is None:
            shared = self._dense(mixture.shared, normed)
        given = normed
        if mixture.into is not None:
            given = self.multiply("latent", mixture.into, normed)[:, : mixture.into.features]
        if mixture.out is None:
            return self.experts(mixture, given, chosen), shared
        mixed = self.experts(mixture, given, chosen, summed=True)
        assert isinstance(mixed, Tensor)
        return self.multiply("from latent", mixture.out, mixed), shared

    def _mixture_apart(
        self, index: int, mixture: BoundMixture, normed: Tensor
    ) -> tuple[Tensor | RoutedRows, Tensor]:
        """Results of the experts, and of the MLP beside them, which reads ``normed``.

        Experts and router read the norms that :meth:`_norms_apart` made room for; a single one is for both.
        """
        assert mixture.shared is not None
        always = self._dense(mixture.shared, normed)
        read, routing = self._apart[0], self._apart[-1]
        chosen = self._choose(index, mixture, routing)
        return self.experts(mixture, read, chosen), always

    def _norms_apart(self, layer: BoundLayer, rows: int) -> list[tuple[RowNorm, Tensor]]:
        """Norms of the residual stream for the experts and the router, each with memory for its result; empty
        where they read what the MLP beside them reads."""
        mlp = layer.mlp
        norms = (mlp.norm, mlp.router_norm) if isinstance(mlp, BoundMixture) and mlp.norm else ()
        made = [
            (norm, self.empty(name, rows, self.forward.hidden))
            for name, norm in zip(("routed", "routing"), norms, strict=False)
            if norm is not None
        ]
        self._apart = [result for _, result in made]
        return made

    def _router_adds(self, pending: Pending, norm: RowNorm | None) -> bool:
        """Whether the router's kernel can also do the addition and norm before it."""
        rows = self.tokens.shape[0]
        return (
            norm is not None
            and pending.post is None
            and pending.second is None
            and pending.scale == 1
            and rows <= _JOINED_ROWS
            and self.forward.hidden <= ROUTER_WIDEST
            and isinstance(self._x, Tensor)
        )

    def _choose(
        self,
        index: int,
        mixture: BoundMixture,
        normed: Tensor,
        pending: Pending | None = None,
        norm: RowNorm | None = None,
    ) -> Chosen:
        """The experts of each row; with ``pending``, the router's kernel first computes ``normed``."""
        router, rows = mixture.router, normed.shape[0]
        shared = self.shared_experts(mixture, normed)
        count = 0 if shared is None else shared.down.shape[0]
        ids = self.whole("ids", rows, router.top + count, torch.int32)
        weights = self.whole("weights", rows, router.top + count, torch.float32)
        gated = mixture.shared_gate is not None and shared is None
        gates = self.whole("gates", rows, 1, torch.float32) if gated else None
        groups = Groups(1, 1) if router.groups is None else router.groups
        addition = None
        if pending is not None and norm is not None:
            assert isinstance(self._x, Tensor)
            assert isinstance(pending.first, Tensor)
            stored = self.empty("residual", rows, self.forward.hidden)
            addition = Addition(self._x, pending.first, stored, norm, pending.factor)
            self._x = stored
        self.launch(
            kernels.router(
                normed,
                mixture.weight,
                ids,
                weights,
                scoring=router.scoring,
                normalised=router.normalised,
                scale=router.scale,
                bias=mixture.bias,
                correction=mixture.correction,
                corrects_logits=router.corrects_logits,
                factors=mixture.expert_scale,
                groups=groups.count,
                kept=groups.kept,
                zeroed=groups.zeroed,
                wide=router.wide,
                gate=mixture.shared_gate,
                gates=gates,
                shared=count,
                clusters=self.forward.has_clusters,
                addition=addition,
            )
        )
        if self.forward.observe_routing is not None:
            shape = (-1, self.tokens_each, router.top)
            routed = (values[:, : router.top].reshape(shape) for values in (ids, weights))
            self.forward.observe_routing(index, *routed)
        return Chosen(ids, weights, gates, shared)
