from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from marlinq.models import (
    ModelInstance,
    Projection,
    build_blueprint,
    describe,
    fused_experts,
    shared_inputs,
    tapped,
)
from tests.testing.tiny_models import in_memory, tiny_model

EXPERTS, K, N = 3, 8, 6


def linear(name: str, module: nn.Module) -> Projection:
    n, k = module.get_parameter("weight").shape
    return Projection(name, f"{name}.weight", k, n)


def linears(model: nn.Module, *names: str) -> list[Projection]:
    return [linear(name, model.get_submodule(name)) for name in names]


class FusedExperts(nn.Module):
    """Gate and up projections of all experts in one parameter; token i goes to expert i % 2, none to 2.

    ``transposed`` experts multiply the whole parameter at once, as some models do.
    """

    def __init__(self, *, transposed: bool, interleaved: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = (EXPERTS, K, 2 * N) if transposed else (EXPERTS, 2 * N, K)
        self.gate_up_proj = nn.Parameter(torch.randn(shape, generator=generator))
        self.transposed = transposed
        self.projections = fused_experts(
            "gate_up_proj",
            shape,
            ("gate_proj", "up_proj"),
            transposed=transposed,
            interleaved=interleaved,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.transposed:
            return torch.bmm(torch.stack([x[0::2], x[1::2], x[0::2] * 0]), self.gate_up_proj)
        return torch.stack([functional.linear(x[expert::2], self.gate_up_proj[expert]) for expert in (0, 1)])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_each_expert_is_a_matrix_of_its_own(transposed: bool, interleaved: bool) -> None:
    module = FusedExperts(transposed=transposed, interleaved=interleaved)
    assert len(module.projections) == 2 * EXPERTS
    x = torch.randn(4, K, generator=torch.Generator().manual_seed(1))
    whole = module(x)
    for projection in module.projections:
        assert (projection.in_features, projection.out_features) == (K, N)
        assert projection.expert is not None
        if projection.expert == 2:
            continue
        rows = slice(projection.part, None, 2) if interleaved else slice(projection.part * N, None)
        expected = whole[projection.expert][:, rows][:, :N]
        weight = projection.view(module.gate_up_proj)
        # K products and sums in another order: a few float32 roundings of values near 10.
        torch.testing.assert_close(
            functional.linear(x[projection.expert :: 2], weight), expected, rtol=0, atol=2e-5
        )
    assert [p.name for p in module.projections[:2]] == ["0.gate_proj", "0.up_proj"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_replacing_one_expert_leaves_the_others(transposed: bool, interleaved: bool) -> None:
    module = FusedExperts(transposed=transposed, interleaved=interleaved)
    before = module.gate_up_proj.detach().clone()
    changed = module.projections[3]
    others = [p for p in module.projections if p is not changed]
    with torch.no_grad():
        changed.view(module.gate_up_proj).copy_(torch.full((N, K), 7.0))
    assert torch.equal(changed.view(module.gate_up_proj), torch.full((N, K), 7.0))
    for other in others:
        assert torch.equal(other.view(module.gate_up_proj), other.view(before))


def test_linears_that_did_not_run_come_last_and_alone() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "b", "idle")})
    x = torch.ones(2, 4)
    projections = linears(model, "idle", "a", "b")
    groups = shared_inputs(model, projections, lambda: (model["a"](x), model["b"](x.view(2, 4))))
    assert groups == [("a", "b"), ("idle",)]


def test_a_tensor_changed_in_place_is_another_input() -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "b")})
    x = torch.ones(2, 4)

    def run() -> None:
        model["a"](x)
        x.mul_(2)
        model["b"](x)

    assert shared_inputs(model, linears(model, "a", "b"), run) == [("a",), ("b",)]


def test_hooks_are_removed_afterwards() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4)})
    seen: list[str] = []
    with tapped(model, linears(model, "a"), lambda name, x: seen.append(name)):
        model["a"](torch.ones(1, 4))
    model["a"](torch.ones(1, 4))
    assert seen == ["a"]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_instance_reads_and_replaces_weights(name: str) -> None:
    model = tiny_model(name)
    blueprint = build_blueprint(model.config.to_dict(), source=name)
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    projection = blueprint.blocks[0].projections[-1]
    with instance.loaded(blueprint.blocks[0].name):
        stored = model.get_parameter(projection.parameter)
        weight = instance.weight(projection)
        assert tuple(weight.shape) == (projection.out_features, projection.in_features)
        assert torch.equal(weight, stored.t() if name == "gpt2" else stored)
        owner = instance.model.get_submodule(projection.module)
        assert isinstance(owner, Conv1D if name == "gpt2" else nn.Linear)
        x = torch.randn(2, projection.in_features, generator=torch.Generator().manual_seed(5))
        instance.replace(projection, weight.detach() * 2)
        assert torch.equal(instance.weight(projection), 2 * (stored.t() if name == "gpt2" else stored))
        doubled = functional.linear(x, instance.weight(projection), owner.bias)
        torch.testing.assert_close(owner(x), doubled)
    assert instance.model.get_parameter(projection.parameter).is_meta


def test_a_blueprint_holds_no_model_and_stays_as_it_is() -> None:
    model = tiny_model("llama-tied")
    blueprint = build_blueprint(model.config.to_dict(), source="llama")
    assert blueprint.build() is not blueprint.build()
    assert not any(isinstance(value, (nn.Module, Tensor)) for value in vars(blueprint).values())
    with pytest.raises(TypeError):
        blueprint.kept["x"] = blueprint.kept["lm_head"]  # type: ignore[index]
    head = {"lm_head.weight"}
    free = blueprint.without_ties(head)
    assert set(blueprint.tied) == head
    assert not free.tied
    assert free.parameters["lm_head.weight"] == blueprint.parameters["model.embed_tokens.weight"]
    assert "lm_head.weight" not in blueprint.parameters
    assert blueprint.by_name["lm_head"].out_features == model.config.vocab_size
    assert describe(lambda: model).blocks == blueprint.blocks
