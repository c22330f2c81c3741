"""A forward whose layers are bound to weights, norms, caches and tables for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import nn

from marlinq.kernels import device_numbers
from marlinq.kernels.driver.cuda_driver import on_device
from marlinq.kernels.step import AttentionShape, DeltaWeights, Division, HeadWork, Workspace, divide
from marlinq.models.anatomy import MLP, Anatomy, Attention, DeltaNet, Layer, Mixture, Rotary
from marlinq.runtime.grouped_experts import GroupedExperts
from marlinq.runtime.step.bound import (
    BoundDelta,
    BoundLayer,
    BoundMixture,
    BoundMLP,
    chain_refusal,
    head_norm,
    rotation_table,
    row_norm,
)
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.products import Product, find_product, single_product
from marlinq.runtime.step.reference import attention_sinks


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
        embedding_norm: norm behind the embedding, or None.
        final_norm: norm before the head, or None.
        head: product that gives the logits.
        divisions: for each layer, how its attention is divided among blocks.
        workspace: memory through which the blocks of an attention exchange sums.
        together: whether the rows are neighbouring tokens of one sequence.
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
        tables: dict[Rotary, torch.Tensor] = {}
        apart: dict[str, None] = {}
        self.layers: Sequence[BoundLayer] = [
            self._layer(model, layer, tables, apart) for layer in anatomy.layers
        ]
        self.multiplied_apart = tuple(apart)
        self.embedding_norm = row_norm(model, anatomy.embedding_norm, self.dtype)
        self.final_norm = row_norm(model, anatomy.final_norm, self.dtype)
        self.head = single_product(model, anatomy.head)
        self._divide_attention()

    @property
    def has_clusters(self) -> bool:
        """Whether the GPU has clusters of blocks."""
        return self.lengths.is_cuda and device_numbers(self.device_index).has_clusters

    @property
    def vocabulary(self) -> int:
        """Tokens that can be embedded."""
        return self.embedding.shape[0]

    def on_device(self) -> AbstractContextManager[object]:
        """Make the cache's device the current one, for launches."""
        return on_device(self.device_index) if self.lengths.is_cuda else nullcontext()

    def _layer(
        self, model: nn.Module, layer: Layer, tables: dict[Rotary, torch.Tensor], apart: dict[str, None]
    ) -> BoundLayer:
        attention = layer.attention
        if isinstance(attention, DeltaNet):
            return self._delta_layer(model, layer, attention, apart)
        assert isinstance(attention, Attention)
        qkv, reason = find_product(model, attention.qkv, interleave=False)
        if reason is not None:
            apart[reason] = None
        rotary = attention.rotary
        if rotary is not None and rotary not in tables:
            tables[rotary] = rotation_table(model, rotary, self.capacity)
        shape = (self.batch, attention.kv_heads, self.capacity, attention.head_dim)
        keys = torch.zeros(shape, dtype=self.dtype, device=self.lengths.device)
        return self._bound_layer(
            model,
            layer,
            apart,
            qkv,
            heads=HeadWork(
                table=None if rotary is None else tables[rotary],
                interleaved=rotary is not None and rotary.interleaved,
                query_norm=head_norm(model, attention.query_norm, attention.head_dim, self.dtype),
                key_norm=head_norm(model, attention.key_norm, attention.head_dim, self.dtype),
                turns=attention.qkv.turns,
                gated=attention.gated,
            ),
            keys=keys,
            values=torch.zeros_like(keys),
            sinks=attention_sinks(model, attention),
        )

    def _delta_layer(
        self, model: nn.Module, layer: Layer, net: DeltaNet, apart: dict[str, None]
    ) -> BoundLayer:
        products = []
        for slices in (net.inputs, net.rates):
            product, reason = find_product(model, slices, interleave=False)
            if reason is not None:
                apart[reason] = None
            products.append(product)
        norm = row_norm(model, net.norm, self.dtype)
        assert norm is not None
        assert norm.weight is not None
        taps = model.get_submodule(net.convolution).get_parameter("weight").detach()
        weights = DeltaWeights(
            weight=taps[:, 0].float().contiguous(),
            decay=model.get_parameter(net.decay).detach().float().contiguous(),
            step_bias=model.get_parameter(net.step_bias).detach().float().contiguous(),
            norm=norm.weight,
            eps=net.norm.eps,
            key_heads=net.key_heads,
            value_heads=net.value_heads,
            key_dim=net.key_dim,
            turns=net.inputs.turns,
        )
        device = self.lengths.device
        shape = (self.batch, net.value_heads, net.key_dim, net.value_dim)
        ring = torch.zeros((self.batch, net.taps, net.convolved), dtype=self.dtype, device=device)
        delta = BoundDelta(net, products[1], weights, ring, torch.zeros(shape, device=device))
        empty = torch.empty(0, dtype=self.dtype, device=device)
        return self._bound_layer(
            model, layer, apart, products[0], heads=HeadWork(), keys=empty, values=empty, delta=delta
        )

    def _bound_layer(
        self, model: nn.Module, layer: Layer, apart: dict[str, None], qkv: Product, **mixing: Any
    ) -> BoundLayer:
        """The layer with its norms and products; ``mixing`` are the other fields."""
        assert layer.attention is not None
        assert layer.mlp is not None
        return BoundLayer(
            anatomy=layer,
            qkv=qkv,
            output=single_product(model, layer.attention.output),
            mlp=_bound(model, layer.mlp, apart),
            attention_norm=row_norm(model, layer.attention_norm, self.dtype),
            mlp_norm=row_norm(model, layer.mlp_norm, self.dtype),
            post_attention_norm=row_norm(model, layer.post_attention_norm, self.dtype),
            post_mlp_norm=row_norm(model, layer.post_mlp_norm, self.dtype),
            **mixing,
        )

    def _shape(self, attention: Attention) -> AttentionShape:
        return AttentionShape(
            self.batch, attention.heads, attention.kv_heads, attention.head_dim, self.capacity
        )

    def _divide_attention(self) -> None:
        self.divisions = [
            Division(1) if layer.delta is not None else self._divide(layer.attention) for layer in self.layers
        ]
        divided = [
            (self._shape(layer.attention), division)
            for layer, division in zip(self.layers, self.divisions, strict=True)
            if layer.delta is None
        ]
        self.workspace = Workspace.of(divided, self.lengths.device)

    def neighbours(self, rows: int) -> BoundForward:
        """A forward over the layers and cache of this batch of one, whose rows are ``rows`` neighbouring
        tokens. It has its own lengths."""
        assert self.batch == 1
        other = copy(self)
        other.batch, other.together = rows, True
        other.lengths = torch.zeros(rows, dtype=torch.int32, device=self.lengths.device)
        other._divide_attention()
        return other

    def _divide(self, attention: Attention) -> Division:
        seen = min(self.capacity, attention.window or self.capacity)
        processors = device_numbers(self.device_index).multiprocessors if self.lengths.is_cuda else 1
        shape = self._shape(attention)._replace(capacity=seen)
        return divide(shape, processors, clusters=self.has_clusters)


def _bound(model: nn.Module, mlp: MLP | Mixture, apart: dict[str, None]) -> BoundMLP | BoundMixture:
    if isinstance(mlp, Mixture):
        experts = model.get_submodule(mlp.experts)
        assert isinstance(experts, GroupedExperts)
        weight = model.get_submodule(mlp.router.module).get_parameter("weight").detach().contiguous()
        bias = correction = None
        if mlp.router.bias is not None:
            bias = model.get_parameter(mlp.router.bias).detach().float().contiguous()
        if mlp.router.correction is not None:
            correction = model.get_buffer(mlp.router.correction).detach().float().contiguous()
        shared = None if mlp.shared is None else _bound_mlp(model, mlp.shared, apart)
        gate = None
        if mlp.shared_gate is not None:
            column = model.get_submodule(mlp.shared_gate).get_parameter("weight")
            gate = column.detach().reshape(-1).contiguous()
        return BoundMixture(mlp.router, weight, bias, correction, experts, shared, gate)
    return _bound_mlp(model, mlp, apart)


def _bound_mlp(model: nn.Module, mlp: MLP, apart: dict[str, None]) -> BoundMLP:
    inputs, reason = find_product(model, mlp.inputs, interleave=mlp.gated)
    if reason is not None:
        apart[reason] = None
    return BoundMLP(mlp, inputs, single_product(model, mlp.down))
