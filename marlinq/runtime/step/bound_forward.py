"""A forward whose layers are bound to weights, norms, caches and tables for the kernels."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from marlinq.kernels import device_numbers
from marlinq.kernels.contract.device import H200
from marlinq.kernels.driver.cuda_driver import on_device
from marlinq.kernels.experts import ExpertWeights
from marlinq.kernels.step import (
    AttentionShape,
    AttentionWorkspace,
    ConvolutionWeights,
    DeltaWeights,
    Division,
    Gates,
    HeadWork,
    LatentDivision,
    LatentWeights,
    LatentWorkspace,
    LayerInputWeights,
    MambaWorkspace,
    RateWeights,
    divide,
    divide_latent,
    makes_rates,
)
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
    Rotary,
)
from marlinq.runtime.grouped_experts import GroupedExperts, shared_as_experts
from marlinq.runtime.quant_linear import QuantLinear
from marlinq.runtime.step.attention import attention_sinks
from marlinq.runtime.step.bound import (
    BoundBeside,
    BoundConvolution,
    BoundDelta,
    BoundInputGate,
    BoundLatent,
    BoundLayer,
    BoundLayerInputs,
    BoundMamba,
    BoundMixer,
    BoundMixture,
    BoundMLP,
    chain_refusal,
    head_norm,
    rotation_table,
    row_norm,
    stream_scale,
)
from marlinq.runtime.step.convolution import convolution_weights
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.functions import router_norm_of, vector_of
from marlinq.runtime.step.join import JoinedSlice
from marlinq.runtime.step.latent import absorbed_weights
from marlinq.runtime.step.mamba import mamba_weights
from marlinq.runtime.step.products import Product, find_product, single_product

MOST_TOGETHER = 8
"""Neighbouring tokens of one sequence that a step takes at most."""


class BoundForward(Forward):
    """The weights, norms, caches and tables of a model, for the kernels of steps and prompts.

    Projections that share an input are joined in ``model``.

    Args:
        model: the model with the modules that the anatomy names; all on one GPU.
        anatomy: an anatomy that :func:`marlinq.runtime.step.bound.chain_refusal` does not refuse.
        batch: B.
        capacity: L, tokens that a row can hold.

    Attributes:
        anatomy: the model's parts.
        embedding: [vocabulary, hidden].
        places: learned embeddings of positions; or None.
        dtype: dtype of activations.
        hidden: channels of the residual stream.
        device_index: index of the GPU; 0 on a CPU.
        layers: the layers in order.
        layer_inputs: weights that make a vector for each layer from the token, or None.
        embedding_norm: norm behind the embedding, or None.
        final_norm: norm before the head, or None.
        head: product that gives the logits.
        divisions: for each layer, how its attention is divided among blocks; one block without attention.
        workspace: memory through which the blocks of an attention exchange sums.
        mamba_workspace: memory through which the blocks of a Mamba-2 mixer exchange results.
        latent_divisions: index of a layer -> how its latent attention is divided among blocks.
        latent_workspace: memory between the kernels of latent attention; None without any.
        together: whether the rows are neighbouring tokens of one sequence.
        states: float32 [values], the states of all delta nets one behind the other.
        states_behind: float32 [rows, values], states behind each row, where rows are neighbouring tokens;
            else None.
        multiplied_apart: reasons why projections with the same input were not joined.

    Raises:
        ValueError: the anatomy is refused.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy, *, batch: int, capacity: int) -> None:
        refused = chain_refusal(model, anatomy)
        if refused is not None:
            raise ValueError(f"{refused.part}: {refused.reason}")
        self.batch, self.capacity = batch, capacity
        self.capturable = True
        self.together = False
        self.states_behind: torch.Tensor | None = None
        self.anatomy = anatomy
        self.embedding = model.get_submodule(anatomy.embedding).get_parameter("weight").detach()
        self.places = (
            None
            if anatomy.positions is None
            else model.get_submodule(anatomy.positions).get_parameter("weight").detach()
        )
        self.dtype = self.embedding.dtype
        self.hidden = self.embedding.shape[1]
        device = self.embedding.device
        self.device_index = device.index if device.type == "cuda" else 0
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        nets = [layer.attention for layer in anatomy.layers if isinstance(layer.attention, DeltaNet)]
        values = sum(net.value_heads * net.key_dim * net.value_dim for net in nets)
        self.states = torch.zeros(batch * values, device=device)
        self._states_taken = 0
        tables: dict[Rotary, torch.Tensor] = {}
        apart: dict[str, None] = {}
        self.layers: list[BoundLayer] = []
        for layer in anatomy.layers:
            self.layers.append(self._layer(model, layer, tables, apart))
        self.layer_inputs = self._layer_inputs(model)
        self.multiplied_apart = tuple(apart)
        self.embedding_norm = row_norm(model, anatomy.embedding_norm, self.dtype)
        self.final_norm = row_norm(model, anatomy.final_norm, self.dtype)
        self.head = single_product(model, anatomy.head)
        self._divide_attention()
        mixers = [
            mixer.weights
            for layer in self.layers
            for mixer in (layer.mixer, None if layer.beside is None else layer.beside.mixer)
            if isinstance(mixer, BoundMamba)
        ]
        self.mamba_workspace = MambaWorkspace.of(mixers, batch, device)

    @property
    def has_clusters(self) -> bool:
        """Whether the GPU has clusters of blocks."""
        return self.lengths.is_cuda and device_numbers(self.device_index).has_clusters

    @property
    def vocabulary(self) -> int:
        """Tokens that can be embedded."""
        return self.embedding.shape[0]

    @property
    def outer_products(self) -> tuple[Product, ...]:
        """Products outside the layers."""
        inputs = self.layer_inputs
        return (self.head,) if inputs is None else (self.head, inputs.projection)

    def on_device(self) -> AbstractContextManager[object]:
        """Make the cache's device the current one, for launches."""
        return on_device(self.device_index) if self.lengths.is_cuda else nullcontext()

    def _layer(
        self, model: nn.Module, layer: Layer, tables: dict[Rotary, torch.Tensor], apart: dict[str, None]
    ) -> BoundLayer:
        attention = layer.attention
        empty = torch.empty(0, dtype=self.dtype, device=self.lengths.device)
        if not isinstance(attention, Attention):
            qkv = mixer = latent = None
            if isinstance(attention, DeltaNet | Mamba | GatedConvolution):
                qkv, mixer = self._mixer(model, attention, apart)
            elif attention is not None:
                qkv, latent = self._latent(model, attention, tables, apart)
            others: dict[str, Any] = {"mixer": mixer, "latent": latent}
            return self._bound_layer(
                model, layer, apart, qkv, heads=HeadWork(), keys=empty, values=empty, **others
            )
        qkv, reason = _attention_product(model, attention)
        if reason is not None:
            apart[reason] = None
        rotary, gate = attention.rotary, attention.gate
        gates: Gates = "queries" if attention.gated else "none"
        if gate is not None:
            gates = "heads" if gate.by_head else "channels"
        table = None if rotary is None else self._table(model, rotary, tables)
        shape = (self.batch, attention.kv_heads, self.capacity, attention.head_dim)
        if attention.shared is None:
            keys, values = (
                torch.zeros(shape, dtype=self.dtype, device=self.lengths.device) for _ in range(2)
            )
        else:
            keys, values = self.layers[attention.shared].keys, self.layers[attention.shared].values
        value_norm = attention.value_norm
        return self._bound_layer(
            model,
            layer,
            apart,
            qkv,
            heads=HeadWork(
                table=table,
                interleaved=rotary is not None and rotary.interleaved,
                query_norm=head_norm(model, attention.query_norm, attention.head_dim, self.dtype),
                key_norm=head_norm(model, attention.key_norm, attention.head_dim, self.dtype),
                turns=attention.qkv.turns,
                gates=gates,
                softplus=gate is not None and gate.activation == "softplus",
                value_eps=None if value_norm is None else value_norm.eps,
                keys_are_values=attention.keys_are_values,
                shared=attention.shared is not None,
                norms_behind=attention.norms_behind,
            ),
            keys=keys,
            values=values,
            sinks=attention_sinks(model, attention),
            beside=self._beside(model, layer, apart),
        )

    def _layer_inputs(self, model: nn.Module) -> BoundLayerInputs | None:
        inputs = self.anatomy.layer_inputs
        if inputs is None:
            return None
        norm = row_norm(model, inputs.norm, self.dtype)
        assert norm is not None
        # An RMS norm of a * x is the norm of x with eps / a**2.
        norm = replace(norm, eps=norm.eps / inputs.projection_scale**2)
        table = model.get_submodule(inputs.embedding).get_parameter("weight").detach()
        return BoundLayerInputs(
            single_product(model, inputs.projection),
            LayerInputWeights(table, inputs.embedding_scale, norm, inputs.width, inputs.scale),
        )

    def _input_gate(self, model: nn.Module, layer: Layer) -> BoundInputGate | None:
        gate = layer.input_gate
        if gate is None:
            return None
        norm = row_norm(model, gate.norm, self.dtype)
        return BoundInputGate(
            gate, single_product(model, gate.gate), single_product(model, gate.output), norm
        )

    def _table(self, model: nn.Module, rotary: Rotary, tables: dict[Rotary, torch.Tensor]) -> torch.Tensor:
        """Cosines and sines of a rotation, shared by the layers that have it."""
        if rotary not in tables:
            tables[rotary] = rotation_table(model, rotary, self.capacity)
        return tables[rotary]

    def _latent(
        self,
        model: nn.Module,
        attention: LatentAttention,
        tables: dict[Rotary, torch.Tensor],
        apart: dict[str, None],
    ) -> tuple[Product, BoundLatent]:
        """The product of latent attention's inputs, and the attention with an empty cache."""
        inputs, reason = find_product(model, attention.inputs, interleave=False)
        if reason is not None:
            apart[reason] = None
        norm = row_norm(model, attention.latent_norm, self.dtype)
        assert norm is not None
        device, rotary = self.lengths.device, attention.rotary
        keys, values = absorbed_weights(model, attention, self.dtype, device)
        if rotary is None:
            # Turns by nothing: exact, and 8 bytes a pair and position.
            pairs = torch.tensor([1.0, 0.0], device=device)
            table = pairs.repeat(self.capacity, attention.rotated_dim // 2, 1)
        else:
            table = self._table(model, rotary, tables)
        weights = LatentWeights(
            keys, values, norm, table, interleaved=rotary is not None and rotary.interleaved
        )
        return inputs, BoundLatent(
            attention,
            query_norm=row_norm(model, attention.query_norm, self.dtype),
            query=None if attention.query is None else single_product(model, attention.query),
            weights=weights,
            cache=torch.zeros((self.batch, self.capacity, weights.width), dtype=self.dtype, device=device),
        )

    def _beside(self, model: nn.Module, layer: Layer, apart: dict[str, None]) -> BoundBeside | None:
        if layer.beside is None:
            return None
        inputs, mixer = self._mixer(model, layer.beside, apart, layer.beside_scale / layer.attention_scale)
        assert isinstance(mixer, BoundMamba)
        return BoundBeside(mixer, inputs, single_product(model, layer.beside.output))

    def _mixer(
        self,
        model: nn.Module,
        part: DeltaNet | Mamba | GatedConvolution,
        apart: dict[str, None],
        result_scale: float = 1.0,
    ) -> tuple[Product, BoundMixer]:
        """The product of the inputs of a mixer, and the mixer with an empty state."""
        products = []
        for slices in (part.inputs, *((part.rates,) if isinstance(part, DeltaNet) else ())):
            product, reason = find_product(model, slices, interleave=False)
            if reason is not None:
                apart[reason] = None
            products.append(product)
        device = self.lengths.device
        # Drafts that a verification refuses must not have overwritten the tokens before them.
        slots = part.taps + (MOST_TOGETHER - 1 if self.batch == 1 and isinstance(part, DeltaNet) else 0)
        ring = torch.zeros((self.batch, slots, part.convolved), dtype=self.dtype, device=device)
        if isinstance(part, GatedConvolution):
            weights = ConvolutionWeights(*convolution_weights(model, part.convolution), part.gate)
            return products[0], BoundConvolution(part, weights, ring)
        if isinstance(part, Mamba):
            state = torch.zeros((self.batch, part.heads, part.state_dim, part.head_dim), device=device)
            return products[0], BoundMamba(part, mamba_weights(model, part, result_scale), ring, state)
        shape, first = (self.batch, part.value_heads, part.key_dim, part.value_dim), self._states_taken
        self._states_taken += math.prod(shape)
        state = self.states[first : self._states_taken].view(shape)
        net = self._delta_weights(model, part)
        channels, second = part.channels, None
        if channels is not None:
            second = single_product(model, channels.steps), single_product(model, channels.gates)
        return products[0], BoundDelta(part, products[1], net, ring, state, first, second)

    def _delta_weights(self, model: nn.Module, net: DeltaNet) -> DeltaWeights:
        norm = row_norm(model, net.norm, self.dtype)
        assert norm is not None
        assert norm.weight is not None
        taps = model.get_submodule(net.convolution).get_parameter("weight").detach()
        return DeltaWeights(
            weight=taps[:, 0].float().contiguous(),
            decay=model.get_parameter(net.decay).detach().float().flatten().contiguous(),
            step_bias=model.get_parameter(net.step_bias).detach().float().contiguous(),
            norm=norm.weight,
            eps=net.norm.eps,
            key_heads=net.key_heads,
            value_heads=net.value_heads,
            key_dim=net.key_dim,
            turns=net.inputs.turns,
            rates=_rate_weights(model, net, self.dtype),
            beta_scale=net.beta_scale,
            by_channel=net.channels is not None,
        )

    def _bound_layer(
        self, model: nn.Module, layer: Layer, apart: dict[str, None], qkv: Product | None, **mixing: Any
    ) -> BoundLayer:
        """The layer with its norms and products; ``mixing`` are the other fields."""
        return BoundLayer(
            anatomy=layer,
            qkv=qkv,
            output=None if layer.attention is None else single_product(model, layer.attention.output),
            mlp=None if layer.mlp is None else _bound(model, layer.mlp, apart, self.dtype),
            attention_norm=row_norm(model, layer.attention_norm, self.dtype),
            mlp_norm=row_norm(model, layer.mlp_norm, self.dtype),
            post_attention_norm=row_norm(model, layer.post_attention_norm, self.dtype),
            post_mlp_norm=row_norm(model, layer.post_mlp_norm, self.dtype),
            input_gate=self._input_gate(model, layer),
            stream_scale=stream_scale(model, layer),
            **mixing,
        )

    def _shape(self, attention: Attention) -> AttentionShape:
        return AttentionShape(
            self.batch, attention.heads, attention.kv_heads, attention.head_dim, self.capacity
        )

    def _divide_attention(self) -> None:
        self.divisions = [
            self._divide(layer.attention) if layer.attends else Division(1) for layer in self.layers
        ]
        divided = [
            (self._shape(layer.attention), division)
            for layer, division in zip(self.layers, self.divisions, strict=True)
            if layer.attends
        ]
        self.workspace = AttentionWorkspace.of(divided, self.lengths.device)
        latents = {index: layer.latent.weights for index, layer in enumerate(self.layers) if layer.latent}
        self.latent_divisions = {index: self._divide_latents(weights) for index, weights in latents.items()}
        self.latent_workspace = LatentWorkspace.of(
            self.batch,
            [(weights, self.latent_divisions[index]) for index, weights in latents.items()],
            self.dtype,
        )

    def _divide_latents(self, weights: LatentWeights) -> LatentDivision:
        device = device_numbers(self.device_index) if self.lengths.is_cuda else H200
        sizes = weights.heads, weights.width, self.capacity
        return divide_latent(self.batch, *sizes, device.multiprocessors, device.shared_bytes)

    def neighbours(self, rows: int) -> BoundForward:
        """A forward over the layers and cache of this batch of one, whose rows are ``rows`` neighbouring
        tokens, :data:`MOST_TOGETHER` at most. It has its own lengths, and writes states behind each token."""
        assert self.batch == 1
        assert rows <= MOST_TOGETHER
        other = copy(self)
        other.batch, other.together = rows, True
        other.lengths = torch.zeros(rows, dtype=torch.int32, device=self.lengths.device)
        other.states_behind = self.states.new_zeros((rows, self.states.numel()))
        other._divide_attention()
        return other

    def _divide(self, attention: Attention) -> Division:
        seen = min(self.capacity, attention.window or self.capacity)
        processors = device_numbers(self.device_index).multiprocessors if self.lengths.is_cuda else 1
        shape = self._shape(attention)._replace(capacity=seen)
        return divide(shape, processors, clusters=self.has_clusters)


def _rate_weights(model: nn.Module, net: DeltaNet, dtype: torch.dtype) -> RateWeights | None:
    """The projections of betas and steps for the delta net's kernel; None where they are packed, or the
    kernel can't multiply them."""
    weights = []
    for name in net.rates.modules:
        module = model.get_submodule(name)
        if type(module) is not nn.Linear:
            return None
        bias: torch.Tensor | None = module.bias
        if bias is not None or module.weight.dtype != dtype:
            return None
        weights.append(module.weight.detach().contiguous())
    several = len(weights) > 1
    if len(weights) > 2 or (several and net.rates.turns != 1):
        return None
    if not makes_rates(weights[0].shape[1], net.value_dim):
        return None
    if net.channels is not None:
        # Betas alone.
        weights *= 2
    elif not several:
        # Steps begin behind the first run's betas.
        weights.append(weights[0][net.value_heads // net.rates.turns :])
    return RateWeights(*weights)


def _attention_product(model: nn.Module, attention: Attention) -> tuple[Product, str | None]:
    """The product before attention, with its gates' columns behind the others; as :func:`find_product`."""
    gate, slices = attention.gate, attention.qkv
    if gate is None:
        return find_product(model, slices, interleave=False)
    if isinstance(model.get_submodule(gate.module), QuantLinear | JoinedSlice):
        columns = attention.heads * (1 if gate.by_head else attention.head_dim)
        widths = (*slices.widths, columns)
        whole = replace(slices, modules=(*slices.modules, gate.module), widths=widths)
        product, reason = find_product(model, whole, interleave=False)
        if reason is None:
            return product, None
    product, reason = find_product(model, slices, interleave=False)
    return product.followed_by(single_product(model, gate.module)), reason


def _bound(
    model: nn.Module, mlp: MLP | Mixture, apart: dict[str, None], dtype: torch.dtype
) -> BoundMLP | BoundMixture:
    if isinstance(mlp, Mixture):
        experts = model.get_submodule(mlp.experts)
        assert isinstance(experts, GroupedExperts)
        weight = model.get_submodule(mlp.router.module).get_parameter("weight").detach().contiguous()
        router = mlp.router
        # First: the products of the shared MLP join its linears.
        shared_experts = _shared_experts(model, mlp, experts)
        shared = None if mlp.shared is None else _bound_mlp(model, mlp.shared, apart)
        gate = None
        if mlp.shared_gate is not None:
            column = model.get_submodule(mlp.shared_gate).get_parameter("weight")
            gate = column.detach().reshape(-1).contiguous()
        return BoundMixture(
            router=router,
            weight=weight,
            bias=vector_of(model, router.bias),
            correction=vector_of(model, router.correction),
            experts=experts,
            shared=shared,
            shared_gate=gate,
            into=None if mlp.into is None else single_product(model, mlp.into),
            out=None if mlp.out is None else single_product(model, mlp.out),
            expert_scale=vector_of(model, router.expert_scale),
            router_norm=router_norm_of(model, router, dtype),
            norm=row_norm(model, mlp.norm, dtype),
            post_norm=row_norm(model, mlp.post_norm, dtype),
            shared_post_norm=row_norm(model, mlp.shared_post_norm, dtype),
            shared_experts=shared_experts,
        )
    return _bound_mlp(model, mlp, apart)


def _shared_experts(model: nn.Module, mixture: Mixture, experts: GroupedExperts) -> ExpertWeights | None:
    """Weights of the shared expert as further experts of the routed ones' size; None if it reads another
    input than they do, or can't be cut so."""
    shared = mixture.shared
    if shared is None or mixture.norm is not None or mixture.into is not None:
        return None
    if not shared.gated or shared.gate_scale != 1 or shared.activation != experts.activation:
        return None
    if experts.shared is None and len(shared.inputs.modules) == 2:
        linears = [model.get_submodule(name) for name in (*shared.inputs.modules, shared.down)]
        found = shared_as_experts(experts.weights, *linears)
        if not isinstance(found, str):
            experts.add_shared(found)
    return experts.shared


def _bound_mlp(model: nn.Module, mlp: MLP, apart: dict[str, None]) -> BoundMLP:
    inputs, reason = find_product(model, mlp.inputs, interleave=mlp.gated)
    if reason is not None:
        apart[reason] = None
    return BoundMLP(mlp, inputs, single_product(model, mlp.down))
