"""Functions of a model's modules in torch: linears, norms, MLPs, routers, mixtures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from marlinq.kernels.step import RowNorm
from marlinq.models.anatomy import (
    MLP,
    AttentionGate,
    InputGate,
    LayerInputs,
    Mixture,
    Norm,
    Router,
    Slices,
)
from marlinq.models.formulas import ACTIVATIONS, GATES

Function = Callable[[Tensor], Tensor]
Chosen = Callable[[Tensor, Tensor], None]


def weight_of(model: nn.Module, module: str) -> Tensor:
    return model.get_submodule(module).get_parameter("weight").detach()


def linear_of(model: nn.Module, name: str) -> Function:
    module = model.get_submodule(name)
    if type(module) is not nn.Linear:
        return module
    weight = module.weight.detach()
    bias: Tensor | None = module.bias
    return lambda x: F.linear(x, weight, bias)


def mlp_of(model: nn.Module, mlp: MLP) -> Function:
    inputs, down = parts_of(model, mlp.inputs), linear_of(model, mlp.down)
    activation = ACTIVATIONS[mlp.activation]

    def run(x: Tensor) -> Tensor:
        first, *rest = inputs(x)
        result = activation(first if mlp.gate_scale == 1 else first * mlp.gate_scale)
        return down(result * rest[0] if rest else result)

    return run


def input_gate_of(
    model: nn.Module, gate: InputGate, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of the residual stream and the layer's vector, which gives what is added to the stream."""
    first, last = linear_of(model, gate.gate), linear_of(model, gate.output)
    norm = norm_of(model, gate.norm, dtype)
    activation = ACTIVATIONS[gate.activation]

    def run(x: Tensor, vector: Tensor) -> Tensor:
        result = last(activation(first(x)) * vector)
        return result if norm is None else norm(result)

    return run


def layer_inputs_of(
    model: nn.Module, inputs: LayerInputs, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of token ids [...] and embeddings [..., hidden], which gives vectors [..., layers, P]."""
    table, projection = weight_of(model, inputs.embedding), linear_of(model, inputs.projection)
    norm = norm_of(model, inputs.norm, dtype)
    assert norm is not None

    def run(ids: Tensor, x: Tensor) -> Tensor:
        projected = projection(x) * inputs.projection_scale
        projected = projected.view(*projected.shape[:-1], -1, inputs.width)
        looked_up = (F.embedding(ids, table) * inputs.embedding_scale).view(projected.shape)
        return (norm(projected) + looked_up) * inputs.scale

    return run


def vector_of(model: nn.Module, name: str | None) -> Tensor | None:
    """The parameter or buffer ``name`` as a contiguous float32 vector; None without a name."""
    if name is None:
        return None
    module, _, key = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(module), key)
    return found.detach().float().flatten().contiguous()


def router_norm_of(model: nn.Module, router: Router, dtype: torch.dtype) -> RowNorm | None:
    """The norm of the residual stream that the router reads, with its scale and factor in the weight; None if
    it reads what the experts read."""
    if router.norm is None:
        return None
    held = dict(model.get_submodule(router.norm.module).named_parameters())
    weight, scale = held.get("weight"), vector_of(model, router.input_scale)
    total = torch.tensor(router.input_factor, device=next(model.parameters()).device)
    if weight is not None:
        total = total * (weight.detach().float() + router.norm.offset)
    total = total if scale is None else total * scale
    return RowNorm("RMS_WIDE", total.expand(router.norm.width).to(dtype).contiguous(), None, router.norm.eps)


def route(
    logits: Tensor, router: Router, correction: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Indices, int64, and weights, float32, of the experts that logits [T, experts] choose: both [T, top].

    ``correction``, float32 [experts], affects the choice but not the weights, which ``expert_scale``, float32
    [experts], multiplies.
    """
    wide = logits.float()
    scores = wide.softmax(-1) if router.scoring == "softmax" else wide.sigmoid()
    decisive = scores
    if correction is not None:
        decisive = (wide if router.corrects_logits else scores) + correction
    if router.groups is not None:
        decisive = router.groups.limited(decisive)
    index = decisive.topk(router.top, -1).indices
    weights = scores.gather(-1, index)
    if router.normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    if expert_scale is not None:
        weights = weights * expert_scale[index]
    return index, weights * router.scale


def mixture_of(
    model: nn.Module, mixture: Mixture, chosen: Chosen, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Tensor]:
    """A mixture layer as a function of its normed input and of the residual stream before that norm;
    ``chosen`` is called with the experts' indices and weights, [B, T, top]."""
    experts = model.get_submodule(mixture.experts)
    router = mixture.router
    weight = weight_of(model, router.module)
    bias = None if router.bias is None else model.get_parameter(router.bias).detach()
    correction, expert_scale = vector_of(model, router.correction), vector_of(model, router.expert_scale)
    router_norm, input_scale = norm_of(model, router.norm, dtype), vector_of(model, router.input_scale)
    norms = (mixture.norm, mixture.post_norm, mixture.shared_post_norm)
    norm, post_norm, shared_post_norm = (norm_of(model, each, dtype) for each in norms)
    shared = None if mixture.shared is None else mlp_of(model, mixture.shared)
    gate = None if mixture.shared_gate is None else linear_of(model, mixture.shared_gate)
    into = None if mixture.into is None else linear_of(model, mixture.into)
    out = None if mixture.out is None else linear_of(model, mixture.out)

    def routing_input(x: Tensor, stream: Tensor) -> Tensor:
        if router_norm is None:
            return x
        given = router_norm(stream)
        return (given if input_scale is None else given * input_scale.to(dtype)) * router.input_factor

    def run(x: Tensor, stream: Tensor) -> Tensor:
        rows = routing_input(x, stream).flatten(0, -2)
        logits = F.linear(rows.float(), weight.float()) if router.wide else F.linear(rows, weight, bias)
        index, counts = route(logits, router, correction, expert_scale)
        chosen(index.view(*x.shape[:-1], -1), counts.view(*x.shape[:-1], -1))
        given = (x if norm is None else norm(stream)).flatten(0, -2)
        mixed: Tensor = experts(given if into is None else into(given), index, counts)
        m = (mixed if out is None else out(mixed)).view(x.shape)
        if post_norm is not None:
            m = post_norm(m)
        if shared is not None:
            always = shared(x)
            if shared_post_norm is not None:
                always = shared_post_norm(always)
            m = m + (always if gate is None else torch.sigmoid(gate(x)) * always)
        return m

    return run


def parts_of(model: nn.Module, slices: Slices) -> Callable[[Tensor], Sequence[Tensor]]:
    """The parts of a joined product, each [..., width]."""
    linears = [linear_of(model, name) for name in slices.modules]
    if len(linears) == len(slices.widths) and slices.turns == 1:
        return lambda x: [linear(x) for linear in linears]

    def split(x: Tensor) -> Sequence[Tensor]:
        products = [linear(x) for linear in linears]
        joined = products[0] if len(products) == 1 else torch.cat(products, -1)
        return slices.split(joined)

    return split


def gate_of(model: nn.Module, gate: AttentionGate | None) -> Function | None:
    """Factors [..., gates] of attention's result, a function of its input; None without gates."""
    if gate is None:
        return None
    linear, function = linear_of(model, gate.module), GATES[gate.activation]
    return lambda x: function(linear(x).float()).to(x.dtype)


def norm_of(model: nn.Module, norm: Norm | None, dtype: torch.dtype) -> Function | None:
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
