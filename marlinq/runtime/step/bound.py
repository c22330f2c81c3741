"""Layers of an anatomy bound to weights, norms and caches for the kernels; and why a layer can't be bound."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from marlinq.kernels.experts import ExpertWeights
from marlinq.kernels.launch.prepared import ELEMENTS, VECTOR
from marlinq.kernels.step import (
    Arrangement,
    ConvolutionWeights,
    DeltaWeights,
    HeadNorm,
    HeadWork,
    LatentWeights,
    LayerInputWeights,
    MambaWeights,
    RowNorm,
    convolution_refusal,
    delta_refusal,
    latent_refusal,
    layer_inputs_refusal,
    mamba_refusal,
)
from marlinq.kernels.step.attend import MOST_CHANNELS
from marlinq.kernels.step.residual import WIDEST, WIDEST_SEVERAL
from marlinq.kernels.step.router import MOST_CHOSEN, MOST_EXPERTS, MOST_GROUPS
from marlinq.models.anatomy import (
    MLP,
    Anatomy,
    Attention,
    DeltaNet,
    GatedConvolution,
    InputGate,
    LatentAttention,
    Layer,
    LayerInputs,
    Mamba,
    Mixture,
    Norm,
    Rotary,
    Router,
    Unrecognised,
)
from marlinq.runtime.grouped_experts import GroupedExperts
from marlinq.runtime.step.products import Product, single_product
from marlinq.runtime.step.rotations import frequencies_of


def chain_refusal(model: nn.Module, anatomy: Anatomy) -> Unrecognised | None:
    """The first part of ``anatomy`` that the kernels can't compute, and why; None if there is none."""
    embedding = model.get_submodule(anatomy.embedding).get_parameter("weight")
    hidden = embedding.shape[1]
    if embedding.dtype not in ELEMENTS:
        return Unrecognised(anatomy.embedding, f"activations in {embedding.dtype}; the kernels take 16 bits")
    if hidden % VECTOR or hidden > WIDEST:
        return Unrecognised(
            anatomy.embedding, f"{hidden} channels; the kernels take multiples of 8 to {WIDEST}"
        )
    head = single_product(model, anatomy.head).features
    if head > embedding.shape[0]:
        return Unrecognised(anatomy.head, f"{head} tokens, of which {embedding.shape[0]} can be embedded")
    for layer in anatomy.layers:
        refused = _layer_refusal(model, layer, embedding.dtype)
        if refused is not None:
            return refused
    inputs = anatomy.layer_inputs
    if inputs is not None and (refused := _layer_inputs_refusal(model, inputs)) is not None:
        return refused
    for norm in (anatomy.embedding_norm, anatomy.final_norm, None if inputs is None else inputs.norm):
        if norm is not None and (reason := _norm_refusal(model, norm, embedding.dtype)) is not None:
            return Unrecognised(norm.module, reason)
    return None


def _layer_inputs_refusal(model: nn.Module, inputs: LayerInputs) -> Unrecognised | None:
    norm = inputs.norm
    bias = getattr(model.get_submodule(norm.module), "bias", None) is not None
    reason = layer_inputs_refusal(inputs.width, _kind(norm), bias=bias)
    if reason is not None:
        return Unrecognised(norm.module, reason)
    if (
        inputs.projection_scale <= 0
        or getattr(model.get_submodule(inputs.projection), "bias", None) is not None
    ):
        return Unrecognised(inputs.projection, "a bias, or a factor below zero, before a norm")
    return None


def _layer_refusal(model: nn.Module, layer: Layer, dtype: torch.dtype) -> Unrecognised | None:
    attention, mlp = layer.attention, layer.mlp
    refused = None
    if isinstance(attention, LatentAttention):
        refused = _latent_refusal(attention)
    elif isinstance(attention, Attention):
        refused = _attention_refusal(model, layer.name, attention)
    elif attention is not None:
        refused = _mixer_refusal(model, attention)
    if refused is None and layer.beside is not None:
        refused = _mixer_refusal(model, layer.beside)
        if getattr(model.get_submodule(layer.beside.output), "bias", None) is not None:
            return Unrecognised(layer.beside.output, "a bias behind a mixer beside attention")
    if refused is not None:
        return refused
    if layer.parallel and (layer.post_attention_norm or layer.post_mlp_norm):
        return Unrecognised(layer.name, "a parallel block with norms behind its parts")
    if isinstance(mlp, Mixture):
        refused = _mixture_refusal(model, mlp, dtype)
    elif mlp is not None:
        refused = _mlp_refusal(mlp)
    if refused is not None:
        return refused
    if isinstance(mlp, Mixture) and mlp.shared is not None:
        apart = mlp.norm is not None
        if layer.parallel or (layer.post_mlp_norm is not None and not apart) or (apart and not mlp.post_norm):
            return Unrecognised(mlp.shared.down, "a shared expert in a parallel block, or before a norm")
        if apart and (reason := _apart_refusal(model, layer, mlp)) is not None:
            return Unrecognised(layer.name, reason)
    norms = (
        *(layer.attention_norm, layer.mlp_norm, layer.post_attention_norm, layer.post_mlp_norm),
        None if layer.input_gate is None else layer.input_gate.norm,
        *((mlp.norm, mlp.post_norm, mlp.shared_post_norm) if isinstance(mlp, Mixture) else ()),
        # A Mamba-2 mixer's norm keeps its weight in float32.
        *((attention.norm,) if isinstance(attention, DeltaNet) else ()),
        *(_head_norms(attention) if isinstance(attention, Attention | LatentAttention) else ()),
    )
    for norm in norms:
        if norm is not None and (reason := _norm_refusal(model, norm, dtype)) is not None:
            return Unrecognised(norm.module, reason)
    return None


def _latent_refusal(attention: LatentAttention) -> Unrecognised | None:
    sizes = attention.latent_dim, attention.plain_dim, attention.rotated_dim, attention.value_dim
    reason = latent_refusal(*sizes, attention.latent_norm.kind)
    if reason is None and attention.inputs.widths[0] % VECTOR:
        reason = f"queries of {attention.inputs.widths[0]} columns; the kernels take multiples of {VECTOR}"
    return None if reason is None else Unrecognised(attention.expansion, reason)


def _mixer_refusal(model: nn.Module, mixer: DeltaNet | Mamba | GatedConvolution) -> Unrecognised | None:
    if isinstance(mixer, DeltaNet):
        reason = delta_refusal(mixer.taps, mixer.key_dim, mixer.value_dim)
        channels = mixer.channels
        if reason is None and channels is not None:
            read = zip((channels.steps, channels.gates), mixer.inputs.widths[3:], strict=True)
            for name, width in read:
                if width % VECTOR or single_product(model, name).inner > width:
                    return Unrecognised(name, f"reads {width} channels among others, which it would pad")
    elif isinstance(mixer, GatedConvolution):
        reason = convolution_refusal(mixer.taps, mixer.convolved)
    else:
        norm_width = mixer.width if mixer.norm is None else mixer.norm.width
        reason = mamba_refusal(mixer.taps, mixer.state_dim, mixer.head_dim, norm_width)
    return None if reason is None else Unrecognised(mixer.convolution, reason)


def _head_norms(attention: Attention | LatentAttention) -> tuple[Norm, ...]:
    second = attention.latent_norm if isinstance(attention, LatentAttention) else attention.key_norm
    return tuple(norm for norm in (attention.query_norm, second) if norm is not None)


def _attention_refusal(model: nn.Module, name: str, attention: Attention) -> Unrecognised | None:
    size, norms = attention.head_dim, _head_norms(attention)
    if size % VECTOR or size > MOST_CHANNELS:
        return Unrecognised(
            name, f"heads of {size} channels; the kernels take multiples of {VECTOR} to {MOST_CHANNELS}"
        )
    if attention.heads % attention.kv_heads:
        return Unrecognised(
            name, f"{attention.heads} heads of queries, {attention.kv_heads} of keys and values"
        )
    wide = [norm.width != size for norm in norms]
    if any(wide) and (
        not all(wide)
        or attention.norms_behind
        or attention.qkv.turns != 1
        or attention.gated
        or any(norm.kind == "layer" for norm in norms)
    ):
        return Unrecognised(norms[0].module, "this combination of norms over all heads")
    value_norm = attention.value_norm
    if value_norm is not None:
        held = any(True for _ in model.get_submodule(value_norm.module).parameters())
        if value_norm.kind == "layer" or value_norm.width != size or held:
            return Unrecognised(value_norm.module, "a norm of values with a weight, a mean or over all heads")
    gate = attention.gate
    if gate is not None:
        columns = attention.heads * (1 if gate.by_head else size)
        if getattr(model.get_submodule(gate.module), "bias", None) is not None:
            return Unrecognised(gate.module, "a bias of gates")
        if columns % VECTOR:
            return Unrecognised(gate.module, f"{columns} gates; the kernels take multiples of {VECTOR}")
    if attention.gated and attention.qkv.turns != 1:
        return Unrecognised(name, "gates among queries, keys and values that take turns")
    return None


def _mlp_refusal(mlp: MLP) -> Unrecognised | None:
    if mlp.inputs.turns != 1 or any(width % VECTOR for width in mlp.inputs.widths):
        return Unrecognised(mlp.inputs.modules[0], "gate and up are mixed, or no multiple of 8 columns")
    return None


def _apart_refusal(model: nn.Module, layer: Layer, mixture: Mixture) -> str | None:
    """Why a layer whose experts and router read other norms than the MLP beside them can't be computed."""
    read = [norm for norm in (layer.mlp_norm, mixture.norm) if norm is not None]
    kinds = {_kind(norm) for norm in read} | ({"RMS_WIDE"} if mixture.router.norm is not None else set())
    behind = {_kind(norm) for norm in (mixture.post_norm, mixture.shared_post_norm) if norm is not None}
    if layer.attention is None or len(read) < 2 or len(kinds) > 1 or len(behind) > 1:
        return "an MLP beside experts without a norm of its own, or norms of several kinds"
    width = model.get_submodule(mixture.router.module).get_parameter("weight").shape[1]
    return f"several norms of {width} channels" if width > WIDEST_SEVERAL else None


def _mixture_refusal(model: nn.Module, mixture: Mixture, dtype: torch.dtype) -> Unrecognised | None:
    router = mixture.router
    experts = model.get_submodule(mixture.experts)
    if not isinstance(experts, GroupedExperts):
        return Unrecognised(mixture.experts, f"experts in a {type(experts).__name__}, not packed together")
    weight = model.get_submodule(router.module).get_parameter("weight")
    if weight.dtype != dtype:
        return Unrecognised(router.module, f"its weight is in {weight.dtype}, activations in {dtype}")
    if router.experts > MOST_EXPERTS or router.top > MOST_CHOSEN:
        return Unrecognised(
            router.module,
            f"{router.top} of {router.experts} experts; the kernel takes {MOST_CHOSEN} of {MOST_EXPERTS}",
        )
    if router.norm is not None and router.norm.kind == "layer":
        return Unrecognised(router.norm.module, "a norm before a router that subtracts the mean")
    groups = router.groups
    if groups is not None and groups.count > MOST_GROUPS:
        return Unrecognised(
            router.module, f"{groups.count} groups of experts; the kernel takes {MOST_GROUPS}"
        )
    if groups is not None and groups.summed != (1 if router.correction is None else 2):
        return Unrecognised(
            router.module, f"groups of experts, valued by their {groups.summed} highest scores"
        )
    if mixture.shared_gate is not None:
        held = dict(model.get_submodule(mixture.shared_gate).named_parameters())
        if set(held) != {"weight"} or held["weight"].dtype != dtype:
            found = ", ".join(f"{name} in {value.dtype}" for name, value in held.items())
            return Unrecognised(
                mixture.shared_gate, f"a gate of {found or 'no weight'}; the kernel takes a weight in {dtype}"
            )
    return None if mixture.shared is None else _mlp_refusal(mixture.shared)


def _norm_refusal(model: nn.Module, norm: Norm, dtype: torch.dtype) -> str | None:
    for name, value in model.get_submodule(norm.module).named_parameters():
        if value.dtype != dtype and not torch.equal(value.to(dtype).float(), value.float()):
            return f"its {name} in {value.dtype} has values that {dtype} does not hold"
    return None


@dataclass(frozen=True, eq=False)
class BoundMLP:
    """An MLP with its products."""

    anatomy: MLP
    inputs: Product
    down: Product

    @property
    def arrangement(self) -> Arrangement:
        """Order of the columns of gate and up in the product."""
        if not self.anatomy.gated:
            return "plain"
        return "tiles" if self.inputs.tiles else "halves"

    @property
    def products(self) -> tuple[Product, ...]:
        return self.inputs, self.down


@dataclass(frozen=True, eq=False)
class BoundMixture:
    """A routed MLP with its weights.

    Attributes:
        router: description of the router.
        weight: weight of the router, [E, H].
        bias: float32 [E], added to logits; or None.
        correction: float32 [E], added to scores to choose experts; or None.
        expert_scale: float32 [E], factors on experts' weights; or None.
        router_norm: norm of the residual stream that the router reads; None if it reads what experts read.
        norm, post_norm, shared_post_norm: as in :class:`marlinq.models.anatomy.Mixture`.
        experts: packed experts.
        shared: expert that every token passes; or None.
        shared_experts: weights of ``shared`` as further experts of the routed ones' size, for steps whose
            router takes them for every row; None where it can't be cut so.
        shared_gate: [H]; the sigmoid of its product is the factor of the shared expert. None for a factor of
            1.
        into, out: products to the experts' fewer channels and back; None without.
    """

    router: Router
    weight: Tensor
    bias: Tensor | None
    correction: Tensor | None
    experts: GroupedExperts
    shared: BoundMLP | None
    shared_gate: Tensor | None
    into: Product | None = None
    out: Product | None = None
    expert_scale: Tensor | None = None
    router_norm: RowNorm | None = None
    norm: RowNorm | None = None
    post_norm: RowNorm | None = None
    shared_post_norm: RowNorm | None = None
    shared_experts: ExpertWeights | None = None

    @property
    def own_norms(self) -> tuple[RowNorm, RowNorm] | None:
        """Norms of the experts' and of the shared MLP's results before their sum, or None."""
        if self.post_norm is None or self.shared_post_norm is None:
            return None
        return self.post_norm, self.shared_post_norm

    @property
    def products(self) -> tuple[Product, ...]:
        shared = () if self.shared is None else self.shared.products
        return *shared, *(each for each in (self.into, self.out) if each is not None)


@dataclass(frozen=True, eq=False)
class BoundDelta:
    """A gated delta net with its weights and its state.

    Attributes:
        net: description of the net.
        rates: product that gives betas and steps; for prompts only, if ``weights`` has it too.
        weights: other parameters.
        ring: [B, slots, channels], inputs of the convolution, position p at p modulo slots.
        state: float32 [B, value heads, key channels, value channels].
        first: number of values in the states of the nets before this one.
        second: products that give steps by channel and gates; None without decays by channel.
    """

    net: DeltaNet
    rates: Product
    weights: DeltaWeights
    ring: Tensor
    state: Tensor
    first: int
    second: tuple[Product, Product] | None = None

    def behind(self, states: Tensor) -> Tensor:
        """This net's part of the states of all nets behind several tokens, float32 [T, values]: [T, value
        heads, key channels, value channels]."""
        return states[:, self.first : self.first + self.state.numel()].view(-1, *self.state.shape[1:])

    @property
    def products(self) -> tuple[Product, ...]:
        return self.rates, *(self.second or ())


@dataclass(frozen=True, eq=False)
class BoundMamba:
    """A Mamba-2 mixer with its weights and its state.

    Attributes:
        mixer: description of the mixer.
        weights: parameters other than those of products.
        ring: [B, taps, channels], inputs of the convolution, position p at p modulo taps.
        state: float32 [B, heads, state channels, value channels].
    """

    mixer: Mamba
    weights: MambaWeights
    ring: Tensor
    state: Tensor

    @property
    def products(self) -> tuple[Product, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class BoundConvolution:
    """A gated convolution with its weights and its last inputs.

    Attributes:
        mixer: description of the gated convolution.
        weights: parameters other than those of products.
        ring: [B, taps, channels], inputs of the convolution, position p at p modulo taps.
    """

    mixer: GatedConvolution
    weights: ConvolutionWeights
    ring: Tensor

    @property
    def products(self) -> tuple[Product, ...]:
        return ()


BoundMixer = BoundDelta | BoundMamba | BoundConvolution


@dataclass(frozen=True, eq=False)
class BoundLatent:
    """Latent attention with its weights and its cache.

    Attributes:
        attention: description of the attention.
        query_norm: norm of compressed queries; None without one.
        query: product that gives the queries behind that norm; None without one.
        weights: both halves of the expansion, norm of latents and rotation.
        cache: [B, L, width], latents and rotated keys.
    """

    attention: LatentAttention
    query_norm: RowNorm | None
    query: Product | None
    weights: LatentWeights
    cache: Tensor

    @property
    def products(self) -> tuple[Product, ...]:
        return () if self.query is None else (self.query,)


@dataclass(frozen=True, eq=False)
class BoundBeside:
    """A Mamba-2 mixer beside attention with its products.

    Attributes:
        mixer: the mixer, whose results are multiplied by its factor relative to attention's.
        inputs, output: products before and behind it.
    """

    mixer: BoundMamba
    inputs: Product
    output: Product

    @property
    def products(self) -> tuple[Product, ...]:
        return self.inputs, self.output


@dataclass(frozen=True, eq=False)
class BoundLayerInputs:
    """Product and parameters that make the layers' vectors.

    Attributes:
        projection: product of the embeddings.
        weights: parameters other than those of the product.
    """

    projection: Product
    weights: LayerInputWeights

    @property
    def columns(self) -> int:
        """Channels of the vectors of all layers."""
        return self.weights.table.shape[1]


@dataclass(frozen=True, eq=False)
class BoundInputGate:
    """The part of a layer that reads its own vector, with its products.

    Attributes:
        anatomy: description of it.
        gate, output: products before and behind the product with the vector.
        norm: norm of the result; None without one.
    """

    anatomy: InputGate
    gate: Product
    output: Product
    norm: RowNorm | None

    @property
    def products(self) -> tuple[Product, ...]:
        return self.gate, self.output


@dataclass(frozen=True, eq=False)
class BoundLayer:
    """A layer with its products, norms and cache.

    Attributes:
        anatomy: description of the layer.
        qkv: product that gives queries, keys and values, or the inputs of latent attention or a recurrent
            mixer; None without attention.
        output: product behind attention or the mixer; None without attention.
        mlp: the MLP or the routed experts; None without one.
        attention_norm, mlp_norm, post_attention_norm, post_mlp_norm: norms as in the anatomy.
        heads: norms and rotation of queries and keys; none without ordinary attention.
        keys, values: the cache [B, KV, L, D], which layers may share; empty without ordinary attention.
        mixer: recurrent mixer or gated convolution in the place of attention, or None.
        latent: latent attention in the place of the ordinary one, or None.
        sinks: float32 [H] of attention, or None.
        beside: mixer beside attention, or None.
        input_gate: part that reads the layer's own vector, or None.
        stream_scale: factor on the residual stream at the end of the layer.
    """

    anatomy: Layer
    qkv: Product | None
    output: Product | None
    mlp: BoundMLP | BoundMixture | None
    attention_norm: RowNorm | None
    mlp_norm: RowNorm | None
    post_attention_norm: RowNorm | None
    post_mlp_norm: RowNorm | None
    heads: HeadWork
    keys: Tensor
    values: Tensor
    mixer: BoundMixer | None = None
    latent: BoundLatent | None = None
    sinks: Tensor | None = None
    beside: BoundBeside | None = None
    input_gate: BoundInputGate | None = None
    stream_scale: float = 1.0

    @property
    def attends(self) -> bool:
        """Whether the layer has ordinary attention, not another mixer or nothing in its place."""
        return isinstance(self.anatomy.attention, Attention)

    @property
    def attention(self) -> Attention:
        """The attention of a layer that has it."""
        assert isinstance(self.anatomy.attention, Attention)
        return self.anatomy.attention

    @property
    def products(self) -> tuple[Product, ...]:
        inner = next((each.products for each in (self.mixer, self.latent) if each is not None), ())
        mlp = () if self.mlp is None else self.mlp.products
        attention = () if self.qkv is None or self.output is None else (self.qkv, *inner, self.output)
        others = (each.products for each in (self.beside, self.input_gate) if each is not None)
        return *attention, *itertools.chain(*others), *mlp


def row_norm(model: nn.Module, norm: Norm | None, dtype: torch.dtype) -> RowNorm | None:
    if norm is None:
        return None
    weight, bias = _norm_weights(model, norm, dtype)
    return RowNorm(_kind(norm), weight, bias, norm.eps, norm.offset)


def head_norm(model: nn.Module, norm: Norm | None, size: int, dtype: torch.dtype) -> HeadNorm | None:
    if norm is None:
        return None
    weight, bias = _norm_weights(model, norm, dtype)
    return HeadNorm(_kind(norm), weight, bias, norm.eps, norm.offset, wide=norm.width != size)


def _kind(norm: Norm) -> Literal["RMS", "RMS_WIDE", "LAYER"]:
    if norm.kind == "layer":
        return "LAYER"
    return "RMS" if norm.narrow_first else "RMS_WIDE"


def _norm_weights(model: nn.Module, norm: Norm, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    held = {
        name: value.detach().to(dtype).contiguous()
        for name, value in model.get_submodule(norm.module).named_parameters()
    }
    return held.get("weight"), held.get("bias")


def stream_scale(model: nn.Module, layer: Layer) -> float:
    """The factor on the residual stream at the end of the layer."""
    return 1.0 if layer.stream_scale is None else float(model.get_buffer(layer.stream_scale))


def rotation_table(model: nn.Module, rotary: Rotary, capacity: int) -> Tensor:
    """Cosines and sines [L, channels / 2, 2] in float32."""
    frequencies = frequencies_of(model, rotary)
    angles = torch.arange(capacity, device=frequencies.device).float()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), -1).mul_(rotary.scaling).contiguous()
