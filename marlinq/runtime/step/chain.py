"""A step as a chain of kernels, each launched while the one before it still runs.

A layer is: residual and norm, product of q, k and v, rotation and append, attention, output product, residual
and norm, product of gate and up, activation, down product. Prompts take the same kernels with more rows, and
torch's fused attention.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from marlinq.core.progress import ReportProgress, no_progress
from marlinq.kernels import dependent_launches, device_numbers
from marlinq.kernels import step as kernels
from marlinq.kernels.launch.driver import on_device
from marlinq.kernels.step import (
    AttentionShape,
    Division,
    Gather,
    HeadNorm,
    Prepared,
    RowNorm,
    Workspace,
    divide,
)
from marlinq.kernels.step.prepared import ELEMENTS, VECTOR
from marlinq.kernels.step.residual import WIDEST
from marlinq.models.anatomy import Anatomy, Attention, Layer, Norm, Rotary, Unrecognised
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.products import (
    Product,
    Start,
    find_product,
    precompile_products,
    precompile_prompts,
    single_product,
)
from marlinq.runtime.step.reference import causal_attention

# Up to this batch products overlap with their neighbours, which at 16 rows saves 9 % of a step of
# Llama-3-8B's shape on an H200, and at 64 rows costs 2 %.
_OVERLAPPING_ROWS = 32
_MOST_ROWS = 8192
"""Rows of a prompt that are read at a time, which bounds the memory between products."""


_prepared_for_prompts: WeakSet[nn.Module] = WeakSet()


def chain_refusal(model: nn.Module, anatomy: Anatomy) -> Unrecognised | None:
    """Which part of ``anatomy`` the kernels can't compute, and why; None if they can compute all of it."""
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
    for norm in (anatomy.embedding_norm, anatomy.final_norm):
        if norm is not None and (reason := _norm_refusal(model, norm, embedding.dtype)) is not None:
            return Unrecognised(norm.module, reason)
    return None


def _layer_refusal(model: nn.Module, layer: Layer, dtype: torch.dtype) -> Unrecognised | None:
    attention, mlp = layer.attention, layer.mlp
    size = attention.head_dim
    if size % VECTOR or size > 256:
        return Unrecognised(layer.name, f"heads of {size} channels; the kernels take multiples of 8 to 256")
    if attention.heads % attention.kv_heads:
        return Unrecognised(
            layer.name, f"{attention.heads} heads of queries, {attention.kv_heads} of keys and values"
        )
    if layer.parallel and (layer.post_attention_norm or layer.post_mlp_norm):
        return Unrecognised(layer.name, "a parallel block with norms behind its parts")
    if mlp.inputs.turns != 1 or any(width % VECTOR for width in mlp.inputs.widths):
        return Unrecognised(mlp.inputs.modules[0], "gate and up are mixed, or no multiple of 8 columns")
    head_norms = [norm for norm in (attention.query_norm, attention.key_norm) if norm is not None]
    wide = [norm.width != size for norm in head_norms]
    if any(wide) and (
        not all(wide) or attention.qkv.turns != 1 or any(norm.kind == "layer" for norm in head_norms)
    ):
        return Unrecognised(head_norms[0].module, "this combination of norms over all heads")
    norms = (
        *(layer.attention_norm, layer.mlp_norm, layer.post_attention_norm, layer.post_mlp_norm),
        *head_norms,
    )
    for norm in norms:
        if norm is not None and (reason := _norm_refusal(model, norm, dtype)) is not None:
            return Unrecognised(norm.module, reason)
    return None


def _norm_refusal(model: nn.Module, norm: Norm, dtype: torch.dtype) -> str | None:
    for name, value in model.get_submodule(norm.module).named_parameters():
        if value.dtype != dtype and not torch.equal(value.to(dtype).float(), value.float()):
            return f"its {name} in {value.dtype} has values that {dtype} does not hold"
    return None


@dataclass(frozen=True, eq=False)
class BoundLayer:
    """A layer with what it is multiplied and normalised by."""

    anatomy: Layer
    qkv: Product
    output: Product
    inputs: Product
    down: Product
    attention_norm: RowNorm | None
    mlp_norm: RowNorm | None
    post_attention_norm: RowNorm | None
    post_mlp_norm: RowNorm | None
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None
    table: Tensor | None
    keys: Tensor
    values: Tensor

    @property
    def attention(self) -> Attention:
        return self.anatomy.attention

    @property
    def arrangement(self) -> kernels.Arrangement:
        """How gate and up lie in the product."""
        if not self.anatomy.mlp.gated:
            return "plain"
        return "tiles" if self.inputs.tiles else "halves"

    @property
    def products(self) -> tuple[Product, ...]:
        return self.qkv, self.output, self.inputs, self.down


@dataclass(frozen=True)
class Pending:
    """What products have left for the residual stream, to be added by the next kernel."""

    first: Tensor
    second: Tensor | None
    post: RowNorm | None
    factor: float

    def select(self, rows: Tensor) -> Pending:
        second = None if self.second is None else self.second.index_select(0, rows)
        return Pending(self.first.index_select(0, rows), second, self.post, self.factor)


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
        self._embedding = model.get_submodule(anatomy.embedding).get_parameter("weight").detach()
        self._places = (
            None
            if anatomy.positions is None
            else model.get_submodule(anatomy.positions).get_parameter("weight").detach()
        )
        self.dtype = self._embedding.dtype
        self.hidden = self._embedding.shape[1]
        device = self._embedding.device
        self.device_index = device.index if device.type == "cuda" else 0
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._tables: dict[Rotary, Tensor] = {}
        apart: dict[str, None] = {}
        self.layers = [self._layer(model, layer, apart) for layer in anatomy.layers]
        self._embedding_norm = _row_norm(model, anatomy.embedding_norm, self.dtype)
        self._final_norm = _row_norm(model, anatomy.final_norm, self.dtype)
        self._head = single_product(model, anatomy.head)
        self._divisions = [self._divide(layer.attention) for layer in self.layers]
        shapes = [self._shape(layer.attention) for layer in self.layers]
        self._workspace = Workspace.of(zip(shapes, self._divisions, strict=True), device)
        if model not in _prepared_for_prompts and self.lengths.is_cuda:
            # Joined products have shapes that the model was not compiled for when it was loaded.
            products = [product for layer in self.layers for product in layer.products]
            precompile_prompts(products, self.dtype, self.device_index, _MOST_ROWS, progress)
            _prepared_for_prompts.add(model)
        overlapping = dependent_launches() if batch <= _OVERLAPPING_ROWS else nullcontext()
        with self.on_device(), overlapping:
            self.recording = Recording(self, progress)
        self.reason = f"{len(self.recording.starts)} dependent launches a step"
        if apart:
            self.reason += f"; multiplied apart: {'; '.join(apart)}"

    @property
    def vocabulary(self) -> int:
        """Tokens that can be embedded."""
        return self._embedding.shape[0]

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
        self.check_prompts(ids, lengths)
        batch, width = ids.shape
        # The kernel that embeds tokens reads wherever they point.
        lowest, highest = (int(found) for found in ids.aminmax())
        if lowest < 0 or highest >= self._embedding.shape[0]:
            raise ValueError(f"ids {lowest}..{highest}: expected 0..{self._embedding.shape[0] - 1}")
        self.lengths.zero_()
        each = max(1, _MOST_ROWS // width)
        logits = []
        with self.on_device():
            for begin in range(0, batch, each):
                part = slice(begin, min(begin + each, batch))
                last = lengths[part].to(ids.device, torch.int64) - 1
                logits.append(self._read(ids[part].contiguous(), part, last))
            self.lengths.copy_(lengths)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """As in :class:`Forward`; ``tokens`` is contiguous."""
        with self.on_device():
            if self.observe is not None:
                walk = _Walk(self, tokens, slice(0, self.batch), 1)
                x, pending = walk.layers()
                _, normed = walk.add(x, pending, self._final_norm, counter=self.lengths)
                return self._finished(self._head.run(normed))
            return self.recording.start(tokens)

    def _read(self, ids: Tensor, part: slice, last: Tensor) -> Tensor:
        """Logits behind token ``last[b]`` of every prompt in ``ids`` [b, T], the batch's rows ``part``."""
        rows, width = ids.shape
        walk = _Walk(self, ids.view(-1), part, width)
        x, pending = walk.layers()
        chosen = torch.arange(rows, device=ids.device) * width + last
        few = _Walk(self, ids.view(-1), part, 1)
        _, normed = few.add(x.index_select(0, chosen), pending.select(chosen), self._final_norm)
        return self._finished(self._head.run(normed))

    def _finished(self, logits: Tensor) -> Tensor:
        """Logits behind the head's scale and cap, in place."""
        if self.anatomy.logit_scale != 1:
            logits.mul_(self.anatomy.logit_scale)
        if self.anatomy.logit_softcap is not None:
            logits.div_(self.anatomy.logit_softcap).tanh_().mul_(self.anatomy.logit_softcap)
        return logits

    def on_device(self) -> AbstractContextManager[object]:
        """Launches go to the device of the cache."""
        return on_device(self.device_index) if self.lengths.is_cuda else nullcontext()

    def _layer(self, model: nn.Module, layer: Layer, apart: dict[str, None]) -> BoundLayer:
        attention, mlp = layer.attention, layer.mlp
        qkv, reason = find_product(model, attention.qkv, interleave=False)
        inputs, other_reason = find_product(model, mlp.inputs, interleave=mlp.gated)
        for found in (reason, other_reason):
            if found is not None:
                apart[found] = None
        rotary = attention.rotary
        if rotary is not None and rotary not in self._tables:
            self._tables[rotary] = _rotation_table(model, rotary, self.capacity)
        shape = (self.batch, attention.kv_heads, self.capacity, attention.head_dim)
        keys = torch.zeros(shape, dtype=self.dtype, device=self.lengths.device)
        return BoundLayer(
            anatomy=layer,
            qkv=qkv,
            output=single_product(model, attention.output),
            inputs=inputs,
            down=single_product(model, mlp.down),
            attention_norm=_row_norm(model, layer.attention_norm, self.dtype),
            mlp_norm=_row_norm(model, layer.mlp_norm, self.dtype),
            post_attention_norm=_row_norm(model, layer.post_attention_norm, self.dtype),
            post_mlp_norm=_row_norm(model, layer.post_mlp_norm, self.dtype),
            query_norm=_head_norm(model, attention.query_norm, attention.head_dim, self.dtype),
            key_norm=_head_norm(model, attention.key_norm, attention.head_dim, self.dtype),
            table=None if rotary is None else self._tables[rotary],
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
        return divide(self._shape(attention)._replace(capacity=seen), processors)


class _Walk:
    """The layers over a number of rows, done at once.

    Args:
        forward: whose layers.
        tokens: int64 [M]; M = b * T.
        part: the b sequences of the batch.
        tokens_each: T.
    """

    def __init__(self, forward: ChainForward, tokens: Tensor, part: slice, tokens_each: int) -> None:
        self.forward = forward
        self.tokens = tokens
        self.part = part
        self.tokens_each = tokens_each
        self.lengths = forward.lengths[part]

    # What a recording does otherwise.

    def empty(self, name: str, rows: int, columns: int) -> Tensor:
        """Memory [rows, columns]; what had the same name before is no longer read."""
        return torch.empty((rows, columns), dtype=self.forward.dtype, device=self.lengths.device)

    def launch(self, prepared: Prepared) -> None:
        """A kernel between products."""
        kernels.bind(prepared, self.forward.device_index, dependent=True).start()

    def multiply(self, name: str, product: Product, x: Tensor) -> Tensor:
        """[M, columns of the product]."""
        return product.run(x)

    def attend(self, index: int, q: Tensor) -> Tensor:
        """Attention of the new tokens: q [M, H, D] to [M, H * D]."""
        layer = self.forward.layers[index]
        if self.tokens_each == 1:
            return self._attend_one(index, q)
        sequences = self.lengths.shape[0]
        new = slice(0, self.tokens_each)
        queries = q.view(sequences, self.tokens_each, *q.shape[1:]).transpose(1, 2)
        keys, values = layer.keys[self.part, :, new], layer.values[self.part, :, new]
        mixed = causal_attention(queries, keys, values, layer.attention)
        return mixed.transpose(1, 2).reshape(q.shape[0], -1)

    def observed(self, index: int, x: Tensor) -> None:
        """The hidden states behind a layer."""
        observe = self.forward.observe
        if observe is not None:
            observe(index, x.view(-1, self.tokens_each, self.forward.hidden))

    # The walk itself.

    def embedded(self) -> Gather:
        """What the first layer reads."""
        forward = self.forward
        return Gather(
            self.tokens,
            forward._embedding,
            forward.anatomy.embedding_scale,
            forward._places,
            forward.anatomy.positions_offset,
        )

    def layers(self) -> tuple[Tensor, Pending]:
        """The residual stream behind the last layer, and what is still to be added to it."""
        forward = self.forward
        x: Tensor | Gather = self.embedded()
        pending: Pending | None = None
        if forward._embedding_norm is not None:
            _, x = self.add(x, None, forward._embedding_norm)
        for index, layer in enumerate(forward.layers):
            x, normed = self.add(x, pending, layer.attention_norm)
            if index:
                self.observed(index - 1, x)
            mixed = self._attention(index, layer, normed)
            factor = layer.anatomy.residual_scale
            if layer.anatomy.parallel:
                if layer.anatomy.mlp_norm != layer.anatomy.attention_norm:
                    _, normed = self.add(x, None, layer.mlp_norm)
                pending = Pending(mixed, self._mlp(layer, normed), None, factor)
                continue
            pending = Pending(mixed, None, layer.post_attention_norm, factor)
            x, normed = self.add(x, pending, layer.mlp_norm)
            pending = Pending(self._mlp(layer, normed), None, layer.post_mlp_norm, factor)
        if isinstance(x, Gather) or pending is None:
            raise ValueError("a model without layers")
        if forward.observe is not None:
            self.observed(len(forward.layers) - 1, self.add(x, pending, None)[0])
        return x, pending

    def add(
        self,
        source: Tensor | Gather,
        pending: Pending | None,
        norm: RowNorm | None,
        counter: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The residual stream with what was pending, and its normalisation; the same without ``norm``."""
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
                post=None if pending is None else pending.post,
                factor=1.0 if pending is None else pending.factor,
                lengths=self.lengths,
                tokens_each=self.tokens_each,
                counter=counter,
            )
        )
        x = source if stored is None else stored
        assert isinstance(x, Tensor)
        return x, x if out is None else out

    def _attention(self, index: int, layer: BoundLayer, normed: Tensor) -> Tensor:
        forward, attention = self.forward, layer.attention
        joined = self.multiply("qkv", layer.qkv, normed)
        rows = joined.shape[0]
        q = self.empty("queries", rows, attention.heads * attention.head_dim)
        q = q.view(rows, attention.heads, attention.head_dim)
        self.launch(
            kernels.append(
                joined,
                q,
                layer.keys[self.part],
                layer.values[self.part],
                self.lengths,
                table=layer.table,
                interleaved=attention.rotary is not None and attention.rotary.interleaved,
                query_norm=layer.query_norm,
                key_norm=layer.key_norm,
                tokens_each=self.tokens_each,
                turns=attention.qkv.turns,
                hold=forward._divisions[index].early,
            )
        )
        return self.multiply("output", layer.output, self.attend(index, q))

    def _attend_one(self, index: int, q: Tensor) -> Tensor:
        forward, layer = self.forward, self.forward.layers[index]
        out = self.empty("attended", q.shape[0], q.shape[1] * q.shape[2])
        self.launch(
            kernels.attend(
                q,
                layer.keys[self.part],
                layer.values[self.part],
                out.view(q.shape),
                self.lengths,
                forward._workspace,
                scale=layer.attention.scale,
                division=forward._divisions[index],
                window=layer.attention.window,
                softcap=layer.attention.softcap,
            )
        )
        return out

    def _mlp(self, layer: BoundLayer, normed: Tensor) -> Tensor:
        rows = normed.shape[0]
        if rows <= _MOST_ROWS:
            return self._mlp_of(layer, normed)
        return torch.cat([self._mlp_of(layer, part) for part in torch.split(normed, _MOST_ROWS)])

    def _mlp_of(self, layer: BoundLayer, normed: Tensor) -> Tensor:
        x = self.multiply("inputs", layer.inputs, normed)
        # Whole tiles, or what the parts have.
        columns = x.shape[1] // 2 if layer.arrangement == "tiles" else layer.anatomy.mlp.inputs.widths[0]
        active = self.empty("active", x.shape[0], columns)
        self.launch(kernels.activate(x, active, layer.anatomy.mlp.activation, layer.arrangement))
        return self.multiply("down", layer.down, active)


class Recording(_Walk):
    """A step over the whole batch: buffers that stay, and the launches of which it consists.

    Attributes:
        starts: the launches in order.
    """

    def __init__(self, forward: ChainForward, progress: ReportProgress) -> None:
        tokens = torch.zeros(forward.batch, dtype=torch.int64, device=forward.lengths.device)
        super().__init__(forward, tokens, slice(0, forward.batch), 1)
        products = [product for layer in forward.layers for product in layer.products]
        products.append(forward._head)
        if tokens.is_cuda:
            precompile_products(products, forward.batch, forward.dtype, forward.device_index, progress)
        # Padded products read zeros behind what kernels write.
        self._widest = max(product.inner for product in products)
        self._buffers: dict[tuple[str, int, int], Tensor] = {}
        self._turns: dict[str, int] = {}
        self._recorded: list[Prepared | Start] = []
        x, pending = self.recorded_layers()
        _, normed = self.add(x, pending, forward._final_norm, counter=forward.lengths)
        logits = self.multiply("logits", forward._head, normed)
        self.logits = logits[:, : forward._head.features]
        if forward.anatomy.logit_scale != 1 or forward.anatomy.logit_softcap is not None:
            self._recorded.append(lambda: forward._finished(self.logits))
        prepared = [item for item in self._recorded if isinstance(item, kernels.Prepared)]
        kernels.precompile_prepared(prepared, forward.device_index, progress)
        self.starts: list[Start] = []
        for item in self._recorded:
            if isinstance(item, kernels.Prepared):
                launch = kernels.bind(item, forward.device_index, dependent=True)
                if not self.starts:
                    # The first kernel embeds the tokens, wherever they are.
                    self._first = launch
                self.starts.append(launch.start)
            else:
                self.starts.append(item)

    def recorded_layers(self) -> tuple[Tensor, Pending | None]:
        """The residual stream behind the last layer, and what is still to be added to it."""
        return self.layers()

    def record(self, start: Start) -> None:
        """Launches of somebody else's."""
        self._recorded.append(start)

    def start(self, tokens: Tensor) -> Tensor:
        """A step; returns logits [B, vocabulary]."""
        self._first.arguments.tokens = tokens.data_ptr()
        for start in self.starts:
            start()
        return self.logits

    def empty(self, name: str, rows: int, columns: int) -> Tensor:
        # The residual stream is read while its successor is written.
        turn = self._turns[name] = 1 - self._turns.get(name, 0)
        found = self._buffers.get((name, turn, columns))
        if found is None:
            # Queries are taken as they lie.
            wide = columns if name == "queries" else max(columns, self._widest)
            found = torch.zeros((rows, wide), dtype=self.forward.dtype, device=self.lengths.device)
            self._buffers[name, turn, columns] = found
        return found[:, :columns]

    def launch(self, prepared: Prepared) -> None:
        self._recorded.append(prepared)

    def multiply(self, name: str, product: Product, x: Tensor) -> Tensor:
        out = self.empty(name, x.shape[0], product.columns)
        if x.shape[1] < product.inner:
            x = x.as_strided((x.shape[0], product.inner), x.stride(), x.storage_offset())
        self._recorded += product.bind(x, out)
        return out

    def observed(self, index: int, x: Tensor) -> None:
        pass


def _row_norm(model: nn.Module, norm: Norm | None, dtype: torch.dtype) -> RowNorm | None:
    if norm is None:
        return None
    weight, bias = _norm_weights(model, norm, dtype)
    return RowNorm(_kind(norm), weight, bias, norm.eps, norm.offset)


def _head_norm(model: nn.Module, norm: Norm | None, size: int, dtype: torch.dtype) -> HeadNorm | None:
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


def _rotation_table(model: nn.Module, rotary: Rotary, capacity: int) -> Tensor:
    """Cosines and sines [L, channels / 2, 2] in float32."""
    frequencies = model.get_submodule(rotary.module).get_buffer(rotary.frequencies).float()
    angles = torch.arange(capacity, device=frequencies.device).float()[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), -1).mul_(rotary.scaling).contiguous()
