"""A step as a chain of kernels, each launched while the one before it still runs.

A layer is: residual and norm, product of q, k and v, rotation and append, attention, output product, residual
and norm, product of gate and up, activation, down product. Prompts take the same kernels with more rows, and
torch's fused attention.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from weakref import WeakSet

import torch
from torch import Tensor, nn

from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels import dependent_launches, device_numbers
from marlinq.kernels.launch.driver import on_device
from marlinq.kernels.step import AttentionShape, Division, HeadWork, Workspace, divide
from marlinq.models.anatomy import MLP, Anatomy, Attention, Layer, Mixture, Rotary
from marlinq.runtime.grouped_experts import GroupedExperts
from marlinq.runtime.step.bound import (
    BoundLayer,
    BoundMixture,
    BoundMLP,
    chain_refusal,
    head_norm,
    rotation_table,
    row_norm,
)
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.products import find_product, precompile_prompts, single_product
from marlinq.runtime.step.prompts import MOST_ROWS, read_prompts
from marlinq.runtime.step.walk import Recording, Walk, finish

# Up to this batch products overlap with their neighbours, which at 16 rows saves 9 % of a step of
# Llama-3-8B's shape on an H200, and at 64 rows costs 2 %.
_OVERLAPPING_ROWS = 32

_prepared_for_prompts: WeakSet[nn.Module] = WeakSet()


class ChainForward(Forward):
    """What ``anatomy`` says, on a GPU, in kernels that overlap with their neighbours.

    Projections that share an input are joined in ``model``. A step's launches are prepared at construction,
    and its kernels compiled.

    Args:
        model: where the anatomy's names lead; all on one GPU.
        anatomy: not refused by :func:`chain_refusal`.
        batch, capacity: B and L.
        progress: called after each kernel that is compiled.

    Raises:
        ValueError: the anatomy is refused.
        EnvironmentProblem: a kernel does not compile.
    """

    def __init__(
        self,
        model: nn.Module,
        anatomy: Anatomy,
        *,
        batch: int,
        capacity: int,
        progress: ReportProgress = no_progress,
    ) -> None:
        refused = chain_refusal(model, anatomy)
        if refused is not None:
            raise ValueError(f"{refused.part}: {refused.reason}")
        self.batch, self.capacity = batch, capacity
        self.capturable = True
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
        self._tables: dict[Rotary, Tensor] = {}
        apart: dict[str, None] = {}
        self.layers = [self._layer(model, layer, apart) for layer in anatomy.layers]
        self.embedding_norm = row_norm(model, anatomy.embedding_norm, self.dtype)
        self.final_norm = row_norm(model, anatomy.final_norm, self.dtype)
        self.head = single_product(model, anatomy.head)
        self.divisions = [self._divide(layer.attention) for layer in self.layers]
        shapes = [self._shape(layer.attention) for layer in self.layers]
        self.workspace = Workspace.of(zip(shapes, self.divisions, strict=True), device)
        if model not in _prepared_for_prompts and self.lengths.is_cuda:
            # Joined products have shapes that the model was not compiled for when it was loaded.
            products = [product for layer in self.layers for product in layer.products]
            precompile_prompts(products, self.dtype, self.device_index, MOST_ROWS, progress)
            _prepared_for_prompts.add(model)
        overlapping = dependent_launches() if batch <= _OVERLAPPING_ROWS else nullcontext()
        with self.on_device(), overlapping:
            self.recording = Recording(self, progress)
        self.reason = f"{len(self.recording.starts)} dependent launches a step"
        if apart:
            self.reason += f"; multiplied apart: {'; '.join(apart)}"

    @property
    def has_clusters(self) -> bool:
        """Whether the GPU has clusters of blocks."""
        return self.lengths.is_cuda and device_numbers(self.device_index).has_clusters

    @property
    def vocabulary(self) -> int:
        """Tokens that can be embedded."""
        return self.embedding.shape[0]

    def use(self, recording: Recording, reason: str) -> None:
        """Steps are ``recording`` from now on, for this reason."""
        self.recording = recording
        self.reason = reason

    @torch.no_grad()
    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """As in :class:`Forward`.

        Raises:
            ValueError: ``ids`` is of another batch or longer than the capacity, a length is not 1..T, or an
                id is not of the vocabulary.
        """
        counts = self.check_prompts(ids, lengths)
        batch, width = ids.shape
        # The kernel that embeds tokens reads wherever they point.
        lowest, highest = (int(found) for found in ids.aminmax())
        if lowest < 0 or highest >= self.embedding.shape[0]:
            raise ValueError(f"ids {lowest}..{highest}: expected 0..{self.embedding.shape[0] - 1}")
        self.lengths.zero_()
        each = max(1, MOST_ROWS // width)
        logits = []
        with self.on_device():
            for begin in range(0, batch, each):
                part = slice(begin, min(begin + each, batch))
                x, pending = read_prompts(self, ids[part].contiguous(), part, counts[part])
                few = Walk(self, ids[part, 0].contiguous(), part, 1)
                _, normed = few.add(x, pending, self.final_norm)
                logits.append(finish(self.head.run(normed), self.anatomy))
            self.lengths.copy_(lengths)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """As in :class:`Forward`; ``tokens`` is contiguous."""
        with self.on_device():
            if self.observe is not None:
                walk = Walk(self, tokens, slice(0, self.batch), 1)
                x, pending = walk.layers()
                _, normed = walk.add(x, pending, self.final_norm, counter=self.lengths)
                return finish(self.head.run(normed), self.anatomy)
            return self.recording.start(tokens)

    def on_device(self) -> AbstractContextManager[object]:
        """Launches go to the device of the cache."""
        return on_device(self.device_index) if self.lengths.is_cuda else nullcontext()

    def _layer(self, model: nn.Module, layer: Layer, apart: dict[str, None]) -> BoundLayer:
        attention = layer.attention
        qkv, reason = find_product(model, attention.qkv, interleave=False)
        if reason is not None:
            apart[reason] = None
        rotary = attention.rotary
        if rotary is not None and rotary not in self._tables:
            self._tables[rotary] = rotation_table(model, rotary, self.capacity)
        shape = (self.batch, attention.kv_heads, self.capacity, attention.head_dim)
        keys = torch.zeros(shape, dtype=self.dtype, device=self.lengths.device)
        return BoundLayer(
            anatomy=layer,
            qkv=qkv,
            output=single_product(model, attention.output),
            mlp=_bound(model, layer.mlp, apart),
            attention_norm=row_norm(model, layer.attention_norm, self.dtype),
            mlp_norm=row_norm(model, layer.mlp_norm, self.dtype),
            post_attention_norm=row_norm(model, layer.post_attention_norm, self.dtype),
            post_mlp_norm=row_norm(model, layer.post_mlp_norm, self.dtype),
            heads=HeadWork(
                table=None if rotary is None else self._tables[rotary],
                interleaved=rotary is not None and rotary.interleaved,
                query_norm=head_norm(model, attention.query_norm, attention.head_dim, self.dtype),
                key_norm=head_norm(model, attention.key_norm, attention.head_dim, self.dtype),
                turns=attention.qkv.turns,
            ),
            keys=keys,
            values=torch.zeros_like(keys),
        )

    def _shape(self, attention: Attention) -> AttentionShape:
        return AttentionShape(
            self.batch, attention.heads, attention.kv_heads, attention.head_dim, self.capacity
        )

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
        correction = None
        if mlp.router.correction is not None:
            correction = model.get_buffer(mlp.router.correction).detach().float().contiguous()
        shared = None if mlp.shared is None else _bound_mlp(model, mlp.shared, apart)
        gate = None
        if mlp.shared_gate is not None:
            column = model.get_submodule(mlp.shared_gate).get_parameter("weight")
            gate = column.detach().reshape(-1).contiguous()
        return BoundMixture(mlp.router, weight, correction, experts, shared, gate)
    return _bound_mlp(model, mlp, apart)


def _bound_mlp(model: nn.Module, mlp: MLP, apart: dict[str, None]) -> BoundMLP:
    inputs, reason = find_product(model, mlp.inputs, interleave=mlp.gated)
    if reason is not None:
        apart[reason] = None
    return BoundMLP(mlp, inputs, single_product(model, mlp.down))
