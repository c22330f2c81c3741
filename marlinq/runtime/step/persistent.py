"""A step of one sequence whose layers are a single launch (``kernels/launch/persistent/``).

It replaces the chain's launches between the embedding and the last norm, if the kernel supports the model and
a few steps give the same logits as the chain.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.granularity import Granularity
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.formats.layouts.marlin import permute_scales
from marlinq.kernels import Operand, device_numbers
from marlinq.kernels.launch.persistent import (
    Activation,
    BiasedOperand,
    LayerOperands,
    Model,
    PersistentLayers,
    persistent_refusal,
)
from marlinq.kernels.step import HeadNorm, RowNorm
from marlinq.runtime.quant_linear import QuantLinear
from marlinq.runtime.step.bound import BoundLayer, BoundMLP
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.products import Product
from marlinq.runtime.step.recorded_step import RecordedStep
from marlinq.runtime.step.walk import Pending

# Allowed difference in units of the expected rounding error, as in runtime/step/probe.py: the kernel keeps
# other values in float32 than the chain, so both round independently.
_ALLOWED = 3.0
_PROMPT = 3
_STEPS = 2
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_tanh": "gelu_tanh"}


class _Given(NamedTuple):
    """Operands of all layers, and what the layers share."""

    layers: list[LayerOperands]
    model: Model


class _UnknownPartError(Exception):
    """The kernel does not support a part of the model; the message names it in one clause."""


def join_layers(chain: ChainForward, progress: ReportProgress = no_progress) -> str | None:
    """Make the steps of ``chain`` run all layers in one launch; returns why not, in one clause, or None.

    Only for a single sequence; for more the chain is faster (docs/lab-notes/decode.md, "All layers in one
    kernel").
    """
    if chain.batch > 1:
        return f"{chain.batch} sequences, for which single kernels are faster"
    if chain.capacity < _PROMPT + _STEPS:
        return f"a cache of {chain.capacity} tokens, too few to compare both"
    try:
        given = _given(chain)
    except _UnknownPartError as unknown:
        return str(unknown)
    numbers = device_numbers(chain.device_index)
    refusal = persistent_refusal(given.layers, given.model, numbers.architecture, numbers.shared_bytes)
    if refusal is not None:
        return refusal
    try:
        with chain.on_device():
            joined = _Joined(chain, given, progress)
            difference = _difference(chain, joined)
    except (EnvironmentProblem, RuntimeError) as error:
        return f"its launch fails ({' '.join(str(error).split())[:120]})"
    allowed = _ALLOWED * torch.finfo(chain.dtype).eps * math.sqrt(len(given.layers))
    if not difference <= allowed:
        return f"its logits differ by {difference:.2g}, where rounding explains {allowed:.2g}"
    chain.use(joined, f"all layers in one launch, {len(joined.starts)} launches a step")
    return None


class _Joined(RecordedStep):
    """The chain's step with a single launch for its layers."""

    def __init__(self, forward: ChainForward, given: _Given, progress: ReportProgress) -> None:
        self._given = given
        self._progress = progress
        super().__init__(forward, progress)

    def recorded_layers(self) -> tuple[Tensor, Pending | None]:
        hidden, _ = self.add(self.embedded(), None, None)
        given = self._given
        persistent = PersistentLayers(
            given.layers,
            given.model,
            hidden,
            self.lengths,
            progress=self._progress,
        )
        self.record(persistent.launch)
        return hidden, None


@torch.no_grad()
def _difference(chain: ChainForward, joined: RecordedStep) -> float:
    """Relative difference between the logits of a few steps."""
    ids = torch.arange(_PROMPT + _STEPS, device=chain.device())[None] % chain.vocabulary
    lengths = torch.tensor([_PROMPT], dtype=torch.int32)
    logits = []
    for steps in (chain.recorded, joined):
        chain.prefill(ids[:, :_PROMPT], lengths)
        rows = [
            steps.start(ids[:, place].contiguous()).float().clone() for place in range(_PROMPT, ids.shape[1])
        ]
        logits.append(torch.stack(rows))
    return float((logits[1] - logits[0]).norm() / logits[0].norm())


def _given(chain: ChainForward) -> _Given:
    if chain.anatomy.embedding_norm is not None:
        raise _UnknownPartError("a norm behind the embedding")
    layers = chain.layers
    models = {_model(layer) for layer in layers}
    if len(models) > 1:
        raise _UnknownPartError("layers that differ in norms, scales or heads")
    (model,) = models
    # Layers share tables.
    tables = {id(layer.heads.table): _halves(layer.heads.table) for layer in layers}
    return _Given([_operands(layer, chain.hidden, *tables[id(layer.heads.table)]) for layer in layers], model)


def _halves(table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, D / 2] of a rotation table."""
    if table is None:
        raise _UnknownPartError("no rotary embedding")
    return table[..., 0].contiguous(), table[..., 1].contiguous()


def _model(layer: BoundLayer) -> Model:
    if not layer.attends:
        raise _UnknownPartError("layers without ordinary attention")
    if layer.heads.gates != "none" or layer.heads.norms_behind or layer.sinks is not None:
        raise _UnknownPartError("gated heads, norms behind a rotation, or attention sinks")
    if layer.input_gate is not None or layer.stream_scale != 1:
        raise _UnknownPartError("per-layer inputs, or a factor on the residual stream")
    if len(layer.attention.qkv.widths) != 3 or layer.attention.value_norm is not None:
        raise _UnknownPartError("keys and values that are shared or the same, or a norm of values")
    anatomy, attention = layer.anatomy, layer.attention
    if not isinstance(layer.mlp, BoundMLP):
        raise _UnknownPartError("experts")
    mlp = layer.mlp.anatomy
    scales = anatomy.attention_scale, anatomy.mlp_scale, mlp.gate_scale
    if anatomy.parallel or anatomy.beside is not None or any(scale != 1 for scale in scales):
        raise _UnknownPartError("parallel blocks, or a factor on what is added")
    activation = _ACTIVATIONS.get(mlp.activation)
    if activation is None or layer.mlp.arrangement != "tiles":
        raise _UnknownPartError(f"{mlp.activation}, or gate and up that don't alternate in tiles")
    rotary = attention.rotary
    if rotary is None or rotary.interleaved or rotary.channels != attention.head_dim:
        raise _UnknownPartError("a rotary embedding that does not turn halves of whole heads")
    if attention.qkv.turns != 1:
        raise _UnknownPartError("queries, keys and values that take turns")
    posts = [norm for norm in (layer.post_attention_norm, layer.post_mlp_norm) if norm is not None]
    if len(posts) == 1:
        raise _UnknownPartError("a norm behind one part of a block only")
    first, *others = (_row(norm) for norm in (layer.attention_norm, layer.mlp_norm, *posts))
    heads = [norm for norm in (layer.heads.query_norm, layer.heads.key_norm) if norm is not None]
    if any(norm.kind != first.kind or norm.eps != first.eps for norm in others):
        raise _UnknownPartError("two kinds of norms")
    if any(norm.kind != first.kind or norm.wide or norm.bias is not None for norm in heads):
        raise _UnknownPartError("norms of queries and keys of another kind")
    if len({norm.eps for norm in heads}) > 1:
        raise _UnknownPartError("norms of queries and keys with an eps of their own")
    return Model(
        attention.heads,
        attention.kv_heads,
        first.eps,
        attention.scale,
        activation,
        first.kind == "RMS",
        attention.softcap,
        heads[0].eps if heads else first.eps,
        bool(posts),
    )


def _row(norm: RowNorm | None) -> RowNorm:
    if norm is None or norm.kind == "LAYER" or norm.bias is not None:
        raise _UnknownPartError("norms other than RMS norms without a bias")
    return norm


def _operands(layer: BoundLayer, hidden: int, cosines: Tensor, sines: Tensor) -> LayerOperands:
    device = layer.keys.device
    qkv, output, gate_up, down = (_operand(product) for product in layer.products)
    return LayerOperands(
        qkv,
        output,
        gate_up,
        down,
        _gamma(layer.attention_norm, hidden, device),
        _gamma(layer.mlp_norm, hidden, device),
        layer.keys,
        layer.values,
        cosines,
        sines,
        _head_gamma(layer.heads.query_norm, layer, device),
        _head_gamma(layer.heads.key_norm, layer, device),
        None if layer.post_attention_norm is None else _gamma(layer.post_attention_norm, hidden, device),
        None if layer.post_mlp_norm is None else _gamma(layer.post_mlp_norm, hidden, device),
        layer.attention.window,
    )


def _head_gamma(norm: HeadNorm | None, layer: BoundLayer, device: torch.device) -> Tensor | None:
    return None if norm is None else _gamma(norm, layer.keys.shape[3], device)


def _gamma(norm: RowNorm | HeadNorm | None, width: int, device: torch.device) -> Tensor:
    assert norm is not None
    if norm.weight is None:
        return torch.full((width,), 1.0 + norm.offset, device=device)
    return norm.weight.float() + norm.offset


def _operand(product: Product) -> BiasedOperand:
    linear = product.modules[0]
    if len(product.modules) > 1 or not isinstance(linear, QuantLinear) or linear.order is not None:
        raise _UnknownPartError("products that are not packed, not joined, or in activation order")
    if linear.padded_shape != (linear.in_features, product.features):
        raise _UnknownPartError("padded products")
    bias = None if linear.bias is None else linear.bias.contiguous()
    return BiasedOperand(_grouped(linear.operand), bias)


def _grouped(weight: Operand) -> Operand:
    """The weight with scales per channel repeated for groups, since the kernel reads scales of groups."""
    if weight.scales.shape[0] > 1:
        return weight
    group = Granularity.group(128 if weight.in_features % 128 == 0 else 64)
    groups = group.groups(weight.in_features)

    def repeated(values: Tensor) -> Tensor:
        return permute_scales(permute_scales(values).expand(groups, -1).contiguous())

    zeros = None if weight.zeros is None else repeated(weight.zeros)
    return replace(weight, granularity=group, scales=repeated(weight.scales), zeros=zeros)
