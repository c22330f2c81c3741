"""Routed MLPs: recognised from what they compute, and computed as transformers does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.models import recognise as recognising
from marlinq.models.anatomy import Anatomy, Attention, Groups, Mixture, Router, Unrecognised
from marlinq.models.fused_experts import find_experts
from marlinq.models.recognise import recognise
from marlinq.operations.bench.expert_shapes import ExpertsLayer
from marlinq.operations.bench.synthetic_experts import random_experts
from marlinq.runtime import QuantLinear, marlin_operand
from marlinq.runtime.grouped_experts import GroupedExperts, activation_name, gated_name
from marlinq.runtime.step import functions, recorded_step, walk
from marlinq.runtime.step.bound import BoundMixture, chain_refusal
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.probe import Difference, compare
from marlinq.runtime.step.reference_forward import ReferenceForward
from tests.runtime.step import torch_kernels
from tests.runtime.step.test_chain import TOLERANCE, differences, halved
from tests.testing.decoders import KNOWN, random_decoder
from tests.testing.mixtures import random_mixture
from tests.testing.runnable_folders import random_tuple


@pytest.fixture(autouse=True)
def few_choices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the recordings, but where groups of experts have to be told from chance."""
    if "group" not in request.node.name:
        monkeypatch.setattr(recognising, "_CHOICES", recognising._CHOICES // 4)


def tiny(name: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(5)
    model = random_mixture(name, dtype=torch.float32, **changes)
    generator = torch.Generator().manual_seed(7)
    for key, buffer in model.named_buffers():
        if "correction" in key:
            # transformers makes zeros. These move choices, since scores of small weights are nearly equal.
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def found_in(model: PreTrainedModel) -> Anatomy | Unrecognised:
    return recognise(model, "model.layers")


def router_of(model: PreTrainedModel) -> Router:
    found = found_in(model)
    assert isinstance(found, Anatomy), found
    mixture = found.layers[-1].mlp
    assert isinstance(mixture, Mixture)
    return mixture.router


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "minimax-m2", "glm-4.5", "gpt-oss"]
)
def test_reference_computes_what_transformers_does(name: str) -> None:
    model = tiny(name)
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy), anatomy
    assert not differing(model, anatomy)


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
def test_a_routers_formula_is_found(
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


def test_sinks_biases_and_clamped_swiglu_are_found() -> None:
    model = tiny("gpt-oss")
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy), anatomy
    last = anatomy.layers[-1]
    assert isinstance(last.attention, Attention)
    assert isinstance(last.mlp, Mixture)
    assert last.attention.sinks == "model.layers.1.self_attn.sinks"
    assert last.mlp.router.bias == "model.layers.1.mlp.router.bias"
    assert last.mlp.activation == "clamped_swiglu"


@pytest.mark.parametrize("part", ["sinks", "bias"])
def test_forgotten_sinks_and_biases_are_found_by_the_probe(part: str) -> None:
    model = tiny("gpt-oss")
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    last = anatomy.layers[-1]
    assert isinstance(last.attention, Attention)
    if part == "sinks":
        wrong = with_last_layer(anatomy, attention=replace(last.attention, sinks=None))
    else:
        wrong = with_last_router(anatomy, bias=None)
    assert differing(model, wrong)


def test_a_correction_bias_is_found_and_left_as_it_was() -> None:
    model = tiny("minimax-m2")
    before = {key: value.clone() for key, value in model.named_buffers()}
    found = router_of(model)
    assert (found.scoring, found.normalised, found.scale) == ("sigmoid", True, 1.0)
    assert found.correction is not None
    assert found.correction.startswith("model.layers.1.mlp")
    for key, value in model.named_buffers():
        assert torch.equal(value, before[key]), key


def test_a_scale_behind_a_correction_is_found() -> None:
    found = router_of(tiny("glm-4.5", routed_scaling_factor=2.5))
    assert (found.scoring, found.normalised, found.scale) == ("sigmoid", True, 2.5)
    assert found.correction == "model.layers.1.mlp.gate.e_score_correction_bias"
    assert not router_of(tiny("glm-4.5", norm_topk_prob=False)).normalised


def test_logits_of_a_cast_weight_are_not_rounded() -> None:
    assert not router_of(tiny("minimax-m2").bfloat16()).wide
    model = tiny("glm-4.5").bfloat16()
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    mixture = anatomy.layers[-1].mlp
    assert isinstance(mixture, Mixture)
    assert mixture.router.wide
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    _, expected, _ = model.get_submodule(mixture.router.module)(x)

    def error(router: Router) -> float:
        found: list[Tensor] = []
        run = functions.mixture_of(
            *(model, replace(mixture, router=router), lambda _, each: found.append(each[0])),
            torch.bfloat16,
        )
        run(x, x)
        return float((found[0].sort(-1).values - expected.sort(-1).values).abs().max())

    # Float32's rounding in sums of 64 terms; a bfloat16 logit is off by up to 2**-9 of itself.
    assert error(mixture.router) < 1e-6
    assert error(replace(mixture.router, wide=False)) > 1e-6


@pytest.mark.parametrize(("experts", "groups", "kept"), [(8, 4, 1), (16, 4, 2), (16, 4, 3)])
def test_groups_of_experts_are_found(experts: int, groups: int, kept: int) -> None:
    found = router_of(tiny("glm-4.5", n_routed_experts=experts, n_group=groups, topk_group=kept)).groups
    assert found is not None
    assert (found.count, found.kept) == (groups, kept)


def grouped_router(
    model: PreTrainedModel, choose: Callable[[Tensor, Tensor], Tensor], *, corrected_weights: bool = False
) -> None:
    """Every corrected router of ``model`` takes the numbers [T, top] that ``choose`` makes of what decides
    [T, experts] and of the scores."""
    for module in model.modules():
        if not hasattr(module, "e_score_correction_bias"):
            continue

        def run(x: Tensor, gate: nn.Module = module) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(x.flatten(0, -2).float(), gate.weight.float())
            scores = logits.sigmoid()
            decisive = scores + gate.e_score_correction_bias
            index = choose(decisive, scores)
            weights = (decisive if corrected_weights else scores).gather(1, index)
            return logits, weights, index

        module.forward = run


@pytest.mark.parametrize("groups", [Groups(4, 2), Groups(4, 2, zeroed=True), None])
def test_the_treatment_of_other_groups_is_found(groups: Groups | None) -> None:
    model = tiny("glm-4.5", n_routed_experts=16)
    grouped_router(
        model,
        lambda decisive, _: (decisive if groups is None else groups.limited(decisive)).topk(2, -1).indices,
    )
    assert router_of(model).groups == groups


def best_of_highest(decisive: Tensor, _: Tensor) -> Tensor:
    """Groups count as much as their best expert alone. Of two groups it would be a choice without them."""
    kept = decisive.unflatten(-1, (4, -1)).amax(-1).topk(1, -1).indices
    out = torch.ones(len(decisive), 4, dtype=torch.bool).scatter_(1, kept, False)
    return decisive.masked_fill(out.repeat_interleave(4, 1), -torch.inf).topk(2, -1).indices


def best_of_scores(decisive: Tensor, scores: Tensor) -> Tensor:
    """Groups are compared without the correction."""
    left = Groups(4, 2).limited(scores).isinf()
    return decisive.masked_fill(left, -torch.inf).topk(2, -1).indices


@pytest.mark.parametrize("choose", [best_of_highest, best_of_scores])
def test_groups_of_another_kind_are_refused(choose: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = tiny("glm-4.5", n_routed_experts=16)
    grouped_router(model, choose)
    found = found_in(model)
    assert isinstance(found, Unrecognised)
    assert found.part in ("model.layers.1.mlp.experts", "Glm4MoeForCausalLM")


def test_a_correction_in_weights_behind_groups_is_refused() -> None:
    model = tiny("glm-4.5", n_routed_experts=16)
    grouped_router(
        model,
        lambda decisive, _: Groups(4, 2).limited(decisive).topk(2, -1).indices,
        corrected_weights=True,
    )
    found = found_in(model)
    assert isinstance(found, Unrecognised)
    assert found.part == "model.layers.1.mlp.experts"


def test_reference_chooses_in_groups_as_transformers_does() -> None:
    model = tiny("glm-4.5", n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=4)
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy), anatomy
    assert not differing(model, anatomy)
    last = anatomy.layers[-1]
    assert isinstance(last.mlp, Mixture)
    assert last.mlp.router.groups is not None
    assert differing(model, with_last_router(anatomy, groups=None))


def with_last_layer(anatomy: Anatomy, **changes: Any) -> Anatomy:
    """``anatomy`` with a last layer that differs from the model's."""
    return replace(anatomy, layers=(*anatomy.layers[:-1], replace(anatomy.layers[-1], **changes)))


def with_last_router(anatomy: Anatomy, **changes: Any) -> Anatomy:
    """``anatomy`` with a last router that differs from the model's."""
    mixture = anatomy.layers[-1].mlp
    assert isinstance(mixture, Mixture)
    return with_last_layer(anatomy, mlp=replace(mixture, router=replace(mixture.router, **changes)))


def differing(model: PreTrainedModel, anatomy: Anatomy) -> list[Difference]:
    """The layers that differ between transformers and the reference."""

    def build(batch: int, capacity: int) -> Forward:
        return ReferenceForward(model, anatomy, batch=batch, capacity=capacity)

    return [each for each in compare(model, anatomy, build) if not each.holds]


def corrected_like_a_score(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    values, index = (logits.sigmoid() + correction).topk(2, -1)
    return values, index


def test_a_correction_that_changes_weights_is_refused() -> None:
    model = tiny("minimax-m2")
    for layer in model.model.layers:
        gate = layer.mlp.gate

        def run(x: Tensor, correction: Tensor, gate: nn.Module = gate) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(x, gate.weight)
            return logits, *corrected_like_a_score(logits, correction)

        gate.forward = run
    found = found_in(model)
    assert isinstance(found, Unrecognised)
    assert found.part == "model.layers.0.mlp.experts"


@pytest.mark.parametrize("name", ["minimax-m2", "glm-4.5"])
def test_a_forgotten_correction_is_found_by_the_probe(name: str) -> None:
    model = tiny(name)
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    wrong = with_last_router(anatomy, correction=None)
    assert differing(model, wrong)[0].layer == len(anatomy.layers) - 1


@pytest.mark.parametrize("fault", [{"normalised": True}, {"scale": 1.01}, {"scoring": "sigmoid"}])
def test_a_wrong_router_is_found_by_the_probe(fault: dict[str, Any]) -> None:
    model = tiny("qwen3-moe")
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    wrong = with_last_router(anatomy, **fault)
    assert differing(model, wrong)[0].layer == len(anatomy.layers) - 1


def grouped(model: PreTrainedModel) -> None:
    """Put packed experts with random words into the place of the model's, in float32."""
    for name, module in list(model.named_modules()):
        found = find_experts(name, module, (), set()) if name.endswith(".experts") else None
        if found is not None:
            layer = ExpertsLayer(name, found.count, 1, found.hidden, found.intermediate)
            device = torch.device("cpu")
            weights = random_experts(
                layer,
                Granularity.group(32),
                asymmetric=False,
                dtype=torch.float32,
                device=device,
                weight_format=INT4,
            )
            between = found.activation(module)
            activation = activation_name(between) if found.gated else gated_name(between)
            assert activation is not None
            model.set_submodule(name, GroupedExperts(weights, activation))


# Whose experts have a size of their own, beside that of dense layers.
_OWN_SIZE = ("qwen2-moe", "qwen3-moe", "glm-4.5", "deepseek-v2")


# A tiny model's name, where it is not another mixture's: that one's, and what is changed in its config.
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm-4.5 in groups": ("glm-4.5", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2}),
    # Sizes that the kernels of latent attention take.
    "deepseek-v2 in groups": (
        "deepseek-v2",
        {
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "kv_lora_rank": 128,
            "qk_rope_head_dim": 32,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
        },
    ),
}


PACKED = (
    *("mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "minimax-m2", "glm-4.5", "glm-4.5 in groups"),
    *("deepseek-v2 in groups", "gpt-oss", "nemotron-h-latent-experts", "gemma-4-moe"),
)


def sized(name: str) -> PreTrainedModel:
    """A tiny mixture in float32 with experts of 64 channels."""
    if name in KNOWN:
        # Nemotron's have no gate and fewer channels than their router and the shared expert read.
        sizes = {"moe_intermediate_size": 64} | ({"moe_latent_size": 128} if "latent" in name else {})
        return random_decoder(replace(KNOWN[name], config={**KNOWN[name].config, **sizes}))
    name, changes = _VARIANTS.get(name, (name, {}))
    size = {"moe_intermediate_size" if name in _OWN_SIZE else "intermediate_size": 64}
    return tiny(name, **size, **changes)


@cache
def anatomy_of_sized(name: str) -> Anatomy:
    anatomy = found_in(sized(name))
    assert isinstance(anatomy, Anatomy), anatomy
    return anatomy


def grouped_mixture(name: str) -> tuple[PreTrainedModel, Anatomy]:
    """A tiny mixture in float32 with packed experts, and its anatomy."""
    model, anatomy = sized(name), anatomy_of_sized(name)
    grouped(model)
    return model, anatomy


def test_groups_valued_by_their_best_expert_are_found() -> None:
    model, anatomy = sized("deepseek-v2 in groups"), anatomy_of_sized("deepseek-v2 in groups")
    mixture = anatomy.layers[-1].mlp
    assert isinstance(mixture, Mixture)
    router = mixture.router
    assert router.groups == Groups(4, 2, summed=1)
    assert (router.scoring, router.normalised, router.correction) == ("softmax", False, None)
    assert not differing(model, anatomy)


def test_experts_that_are_not_packed_are_refused() -> None:
    model = tiny("qwen3-moe").half()
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    refused = chain_refusal(model, anatomy)
    assert refused is not None
    assert refused.part == "model.layers.0.mlp.experts"


@pytest.mark.parametrize("name", PACKED)
def test_chain_computes_what_the_reference_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (walk, recorded_step):
        monkeypatch.setattr(module, "kernels", torch_kernels)
    model, anatomy = grouped_mixture(name)
    half, wide = halved(model)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    # Rounding may exchange experts of nearly equal weight; seeds are such that it does not.
    assert max(differences(own, reference, wide.config.vocab_size)) < TOLERANCE


def test_norms_around_experts_and_an_mlp_are_two_launches_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Gemma 4's mixtures: eight norms a layer, three of which are of results."""
    made = []

    def counted(*given: Any, **named: Any) -> torch_kernels.Prepared:
        made.append(named)
        return torch_kernels.residual(*given, **named)

    kernels = SimpleNamespace(**{name: getattr(torch_kernels, name) for name in torch_kernels.__all__})
    kernels.Prepared, kernels.residual = torch_kernels.Prepared, counted
    for module in (walk, recorded_step):
        monkeypatch.setattr(module, "kernels", kernels)
    model, anatomy = grouped_mixture("gemma-4-moe")
    half, _ = halved(model)
    ChainForward(half, anatomy, batch=1, capacity=24)
    assert len(made) == 2 * len(anatomy.layers) + 1


def test_chain_adds_a_shared_expert_without_a_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (walk, recorded_step):
        monkeypatch.setattr(module, "kernels", torch_kernels)
    model, anatomy = grouped_mixture("qwen2-moe")
    half, wide = halved(model)
    last = anatomy.layers[-1]
    assert isinstance(last.mlp, Mixture)
    ungated = replace(last, mlp=replace(last.mlp, shared_gate=None))
    anatomy = replace(anatomy, layers=(*anatomy.layers[:-1], ungated))
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    assert max(differences(own, reference, wide.config.vocab_size)) < TOLERANCE


def packed_shared(model: PreTrainedModel, anatomy: Anatomy) -> None:
    """Put packed linears with random words into the place of shared experts', in float32."""
    for layer in anatomy.layers:
        shared = layer.mlp.shared if isinstance(layer.mlp, Mixture) else None
        for seed, name in enumerate((*shared.inputs.modules, shared.down) if shared is not None else ()):
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            q = random_tuple(
                linear.in_features, linear.out_features, group_size=32, symmetric=True, seed=seed
            )
            model.set_submodule(name, QuantLinear(marlin_operand(q, torch.float32)))


@pytest.mark.parametrize(
    ("name", "changes", "count"),
    [
        ("qwen2-moe", {"shared_expert_intermediate_size": 64}, 1),
        ("glm-4.5", {"n_shared_experts": 2}, 2),
    ],
)
def test_a_router_takes_the_shared_expert(
    name: str, changes: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts behind the routed ones: two products fewer a layer, and the same logits."""
    for module in (walk, recorded_step):
        monkeypatch.setattr(module, "kernels", torch_kernels)
    model = tiny(name, moe_intermediate_size=64, **changes)
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    grouped(model)
    packed_shared(model, anatomy)
    half, wide = halved(model)
    own = ChainForward(half, anatomy, batch=3, capacity=24)
    for layer in own.layers:
        if isinstance(layer.mlp, BoundMixture):
            assert layer.mlp.shared_experts is not None
            assert len(layer.mlp.shared_experts.down.words) == count
    reference = ReferenceForward(wide, anatomy, batch=3, capacity=24)
    assert max(differences(own, reference, wide.config.vocab_size)) < TOLERANCE
    monkeypatch.setattr(recorded_step, "decide_with_shared", lambda *given: None)
    apart = ChainForward(half, anatomy, batch=3, capacity=24)
    mixtures = sum(isinstance(layer.mlp, Mixture) for layer in anatomy.layers)
    # Gate and up, activation, down.
    assert len(apart.recorded.starts) - len(own.recorded.starts) == 3 * mixtures > 0
    assert max(differences(apart, reference, wide.config.vocab_size)) < TOLERANCE


@pytest.mark.parametrize("gate", [nn.Linear(64, 1).half(), nn.Linear(64, 1, bias=False)])
def test_chain_names_a_gate_that_the_kernel_does_not_take(gate: nn.Linear) -> None:
    model, anatomy = grouped_mixture("qwen2-moe")
    half, _ = halved(model)
    assert chain_refusal(half, anatomy) is None
    half.set_submodule("model.layers.1.mlp.shared_expert_gate", gate)
    refused = chain_refusal(half, anatomy)
    assert refused is not None
    assert refused.part == "model.layers.1.mlp.shared_expert_gate"


def test_a_forgotten_gate_is_found_by_the_probe() -> None:
    model = tiny("qwen2-moe")
    anatomy = found_in(model)
    assert isinstance(anatomy, Anatomy)
    last = anatomy.layers[-1]
    assert isinstance(last.mlp, Mixture)
    wrong = replace(last, mlp=replace(last.mlp, shared_gate=None))
    changed = replace(anatomy, layers=(*anatomy.layers[:-1], wrong))

    def build(batch: int, capacity: int) -> Forward:
        return ReferenceForward(model, changed, batch=batch, capacity=capacity)

    found = [each.layer for each in compare(model, changed, build) if not each.holds]
    assert found[0] == len(anatomy.layers) - 1
