"""Routed MLPs: recognised from what they compute, and computed as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.models.anatomy import Anatomy, Mixture, Router, Unrecognised
from marlinq.models.experts import find_experts
from marlinq.models.recognise import recognise
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.synthetic_experts import random_experts
from marlinq.runtime.grouped_experts import GroupedExperts
from marlinq.runtime.step import walk
from marlinq.runtime.step.bound import chain_refusal
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.probe import compare
from marlinq.runtime.step.reference import ReferenceForward
from tests.runtime.step import torch_kernels
from tests.runtime.step.test_chain import TOLERANCE, differences, halved
from tests.testing.mixtures import random_mixture


def tiny(name: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(5)
    model = random_mixture(name, dtype=torch.float32, **changes)
    return model.eval()


def found_in(model: PreTrainedModel) -> Anatomy | Unrecognised:
    return recognise(model, "model.layers")


def router_of(model: PreTrainedModel) -> Router:
    found = found_in(model)
    assert isinstance(found, Anatomy), found
    mixture = found.layers[-1].mlp
    assert isinstance(mixture, Mixture)
    return mixture.router


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe"])
def test_reference_computes_what_transformers_does(name: str) -> None:
    model = tiny(name)
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy), anatomy

    def build(batch: int, capacity: int) -> Forward:
        return ReferenceForward(model, anatomy, batch=batch, capacity=capacity)

    wrong = [each.reason() for each in compare(model, anatomy, build) if not each.holds]
    assert not wrong


@pytest.mark.parametrize("normalised", [True, False])
def test_normalisation_is_seen(normalised: bool) -> None:
    found = router_of(tiny("qwen3-moe", norm_topk_prob=normalised))
    assert found == Router("model.layers.1.mlp.gate", 4, 2, "softmax", normalised)


def replaced_router(model: PreTrainedModel, forward: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    """Weights and numbers of every router from its logits by ``forward``."""
    for layer in model.model.layers:
        gate = layer.mlp.gate

        def run(x: Tensor, gate: nn.Module = gate) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(x, gate.weight)
            return logits, *forward(logits)

        gate.forward = run


def softmax_of_taken(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, index = logits.topk(2, -1)
    return values.softmax(-1), index


def scaled(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, index = logits.softmax(-1).topk(2, -1)
    return 2.5 * values, index


def sigmoid(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, index = logits.sigmoid().topk(2, -1)
    return values / values.sum(-1, keepdim=True), index


def lowest(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, index = logits.softmax(-1).topk(2, -1, largest=False)
    return values, index


def squared(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, index = logits.softmax(-1).topk(2, -1)
    return values.square(), index


@pytest.mark.parametrize(
    ("forward", "scoring", "normalised", "scale"),
    [
        (softmax_of_taken, "softmax", True, 1.0),
        (scaled, "softmax", False, 2.5),
        (sigmoid, "sigmoid", True, 1.0),
    ],
)
def test_what_a_router_computes_is_found(
    forward: Callable[[Tensor], tuple[Tensor, Tensor]], scoring: str, normalised: bool, scale: float
) -> None:
    model = tiny("qwen3-moe")
    replaced_router(model, forward)
    found = router_of(model)
    assert (found.scoring, found.normalised, found.scale) == (scoring, normalised, scale)


@pytest.mark.parametrize("forward", [lowest, squared])
def test_other_routers_are_refused(forward: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    model = tiny("qwen3-moe")
    replaced_router(model, forward)
    found = found_in(model)
    assert isinstance(found, Unrecognised)
    assert found.part == "model.layers.0.mlp.experts"


@pytest.mark.parametrize(
    ("name", "part"),
    [("minimax-m2", "correction_bias"), ("glm-4.5", "correction_bias"), ("gpt-oss", "experts")],
)
def test_correction_biases_and_other_experts_are_refused(name: str, part: str) -> None:
    found = found_in(tiny(name))
    assert isinstance(found, Unrecognised)
    assert part in found.part, found


@pytest.mark.parametrize("fault", [{"normalised": True}, {"scale": 1.01}, {"scoring": "sigmoid"}])
def test_a_wrong_router_is_found_by_the_probe(fault: dict[str, Any]) -> None:
    model = tiny("qwen3-moe")
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    last = anatomy.layers[-1]
    assert isinstance(last.mlp, Mixture)
    wrong = replace(last, mlp=replace(last.mlp, router=replace(last.mlp.router, **fault)))
    changed = replace(anatomy, layers=(*anatomy.layers[:-1], wrong))

    def build(batch: int, capacity: int) -> Forward:
        return ReferenceForward(model, changed, batch=batch, capacity=capacity)

    found = [each.layer for each in compare(model, changed, build) if not each.holds]
    assert found[0] == len(anatomy.layers) - 1


def grouped(model: PreTrainedModel) -> None:
    """Put packed experts with random words into the place of the model's, in float32."""
    for name, module in list(model.named_modules()):
        found = find_experts(name, module, (), set()) if name.endswith(".experts") else None
        if found is not None:
            layer = ExpertsLayer(name, found.count, 1, found.hidden, found.intermediate)
            device = torch.device("cpu")
            weights = random_experts(layer, 32, asymmetric=False, dtype=torch.float32, device=device)
            model.set_submodule(name, GroupedExperts(weights, "silu"))


def grouped_mixture(name: str) -> tuple[PreTrainedModel, Anatomy]:
    """A tiny mixture in float32 with packed experts, and its anatomy."""
    size = {"intermediate_size": 64} if name != "qwen3-moe" else {"moe_intermediate_size": 64}
    model = tiny(name, **size)
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    grouped(model)
    return model, anatomy


def test_experts_that_are_not_packed_are_refused() -> None:
    model = tiny("qwen3-moe").half()
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    refused = chain_refusal(model, anatomy)
    assert refused is not None
    assert refused.part == "model.layers.0.mlp.experts"


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe"])
def test_chain_computes_what_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "kernels", torch_kernels)
    model, anatomy = grouped_mixture(name)
    half, wide = halved(model)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    # Rounding may exchange experts of nearly equal weight; seeds are such that it does not.
    assert max(differences(own, reference, wide.config.vocab_size)) < TOLERANCE


def test_chain_adds_a_shared_expert_and_refuses_its_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "kernels", torch_kernels)
    model = tiny("qwen2-moe", moe_intermediate_size=64)
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    grouped(model)
    half, wide = halved(model)
    refused = chain_refusal(half, anatomy)
    assert refused is not None
    assert refused.part == "model.layers.1.mlp.shared_expert_gate"
    last = anatomy.layers[-1]
    assert isinstance(last.mlp, Mixture)
    ungated = replace(last, mlp=replace(last.mlp, shared_gate=None))
    anatomy = replace(anatomy, layers=(*anatomy.layers[:-1], ungated))
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    assert max(differences(own, reference, wide.config.vocab_size)) < TOLERANCE
