"""Fused experts are found with the right matrices under the right names, and anything else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.models import Experts, ModelInstance, build_blueprint, describe
from marlinq.models.fused_experts import (
    FIRST,
    SECOND,
    ExpertTokens,
    Reached,
    expert_inputs,
    find_experts,
    run_experts,
    tapped_layer,
)
from tests.testing.mixtures import MIXTURES, random_mixture, save_mixture

E, H, INNER, TOKENS = 4, 12, 6, 9


class Plain(nn.Module):
    """Routed experts as transformers writes them; ``upside_down`` gates with the second half."""

    def __init__(self, *, upside_down: bool = False, weigh_inputs: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * INNER, H))
        self.down_proj = nn.Parameter(torch.randn(E, H, INNER))
        self.act_fn = nn.SiLU()
        self.upside_down, self.weigh_inputs = upside_down, weigh_inputs

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for token, slot in ((t, s) for t in range(index.shape[0]) for s in range(index.shape[1])):
            expert, weight = index[token, slot], weights[token, slot]
            x = hidden[token] * (weight if self.weigh_inputs else 1)
            gate, up = functional.linear(x, self.gate_up_proj[expert]).chunk(2)
            if self.upside_down:
                gate, up = up, gate
            y = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            total[token] += y if self.weigh_inputs else y * weight
        return total


def found(module: nn.Module, rules: tuple[Any, ...] = ()) -> Experts:
    experts = find_experts("mlp.experts", module, rules, set())
    assert experts is not None
    return experts


def routing(seed: int, count: int = E, choices: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    index = torch.rand(TOKENS, count, generator=generator).topk(choices, dim=-1).indices
    return index, torch.rand(TOKENS, choices, generator=generator)


def test_plain_experts_are_found() -> None:
    experts = found(Plain())
    assert (experts.count, experts.hidden, experts.intermediate) == (E, H, INNER)
    assert (experts.gated, experts.transposed, experts.interleaved, experts.routed) == (
        True,
        False,
        False,
        True,
    )
    assert [p.name for p in experts.projections[3:6]] == [
        "mlp.experts.1.gate_proj",
        "mlp.experts.1.up_proj",
        "mlp.experts.1.down_proj",
    ]
    assert experts.of(1) == (experts.projections[3:5], experts.projections[5])
    assert find_experts("mlp", nn.Linear(3, 3), (), set()) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"upside_down": True}, "something else than products"),
        ({"weigh_inputs": True}, "something else than products"),
    ],
)
def test_experts_that_compute_otherwise_are_refused(changes: dict[str, bool], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"mlp\.experts: fused experts.*{reason}"):
        found(Plain(**changes))


def test_a_gate_in_the_second_half_is_refused_though_its_own_function_is_used() -> None:
    class Own(Plain):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            up, gate = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * up

    with pytest.raises(UnsupportedError, match="not applied to the first part"):
        found(Own(upside_down=True))


@pytest.mark.parametrize("shape", [(E, 2 * INNER, H + 1), (E, 2 * INNER + 1, H)])
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    module = Plain()
    module.gate_up_proj = nn.Parameter(torch.randn(shape))
    with pytest.raises(UnsupportedError, match=r"gate_up_proj \[\d+, \d+, \d+\].*down_proj"):
        found(module)


def test_refusals_name_the_part_that_is_not_known() -> None:
    """Muse Spark has a norm behind each expert; LongCat-Flash has experts that only pass hidden states on."""
    normed, passing = Plain(), Plain()
    normed.has_post_expert_norm = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"mlp\.experts: a norm behind each expert"):
        found(normed)
    passing.down_proj = nn.Parameter(torch.randn(E - 1, H, INNER))
    with pytest.raises(UnsupportedError, match=r"4 experts in gate_up_proj and 3 in down_proj"):
        found(passing)


def test_other_fused_weights_are_refused() -> None:
    module = Plain()
    module.mixer = nn.Parameter(torch.randn(E, 3, 3))
    with pytest.raises(UnsupportedError, match=r"mixer \[4, 3, 3\]"):
        found(module)


@pytest.mark.parametrize("name", MIXTURES)
def test_every_family_runs_as_its_own_forward(name: str) -> None:
    """The projections, seen as matrices of their own, and the activation give the model's own result."""
    mixture = MIXTURES[name]
    model = random_mixture(name, dtype=torch.float32)
    blueprint = describe(lambda: model)
    experts = next(each for block in blueprint.blocks for each in block.experts)
    module = model.get_submodule(experts.name)
    weights = {p.name: p.view(model.get_parameter(p.parameter)) for p in experts.projections}
    biases = [None if experts.biases is None else model.get_parameter(b) for b in experts.biases or ("", "")]

    def multiply(expert: int, product: int, x: Tensor) -> Tensor:
        first, second = experts.of(expert)
        members = first if product == FIRST else (second,)
        outputs = [functional.linear(x, weights[member.name]) for member in members]
        bias = biases[product]
        if bias is not None:
            step = len(members) if experts.interleaved else 1
            outputs = [y + bias[expert, part::step] for part, y in enumerate(outputs)]
        return torch.cat(outputs, dim=-1)

    rows = TOKENS if experts.routed else experts.count * TOKENS
    x = torch.randn(rows, experts.hidden, generator=torch.Generator().manual_seed(1))
    arguments = (x, *routing(2, experts.count)) if experts.routed else (x,)
    with torch.no_grad():
        theirs = module(*arguments)
        ours = run_experts(experts, experts.activation(module), multiply, *arguments)
    # Sums of at most 64 products of values near one in another order, in float32.
    torch.testing.assert_close(ours, theirs.view(ours.shape), rtol=1e-5, atol=1e-5)
    names = {p.name.rpartition(".")[2] for p in experts.projections}
    assert names == set(mixture.parts)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "llama-4"])
@pytest.mark.parametrize("all_tokens", [False, True])
def test_expert_inputs_are_those_of_the_products(name: str, all_tokens: bool) -> None:
    model = random_mixture(name, dtype=torch.float32)
    experts = next(e for block in describe(lambda: model).blocks for e in block.experts)
    x = torch.randn(TOKENS, experts.hidden, generator=torch.Generator().manual_seed(3))
    index, weights = routing(4, choices=1)
    index[:] = index.clamp(max=2)  # nobody chooses the last
    if experts.routed:
        arguments = (x, index, weights)
    else:
        batched = torch.zeros(experts.count, TOKENS, experts.hidden)
        batched[index[:, 0], torch.arange(TOKENS)] = x
        arguments = (batched.view(-1, experts.hidden),)
    given: list[ExpertTokens] = []
    with torch.no_grad(), tapped_layer(model, experts, given.append):
        for _ in range(2):
            with pytest.raises(Reached):
                model.get_submodule(experts.name)(*arguments)
    twice = ExpertTokens.joined(given)
    assert twice.nbytes == 2 * given[0].nbytes
    x, index = torch.cat((x, x)), torch.cat((index, index))
    wanted = {1, 3}
    with torch.no_grad():
        found = list(expert_inputs(model, experts, twice, wanted, all_tokens=all_tokens))
    seen = {(expert, product): value for expert, product, value in found}
    assert len(seen) == len(found)
    assert {expert for expert, _ in seen} == (wanted if all_tokens else {1})
    for expert in {expert for expert, _ in seen}:
        tokens = slice(None) if all_tokens else index[:, 0] == expert
        assert torch.equal(seen[expert, FIRST], x[tokens])
        assert seen[expert, SECOND].shape == (x[tokens].shape[0], experts.intermediate)
    model.get_submodule(experts.name)(*arguments)  # its own forward is back


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3.5-moe", "gpt-oss", "granite-moe"])
def test_files_of_both_kinds_are_read_alike(name: str, fused: bool, tmp_path: Path) -> None:
    model = save_mixture(tmp_path, name, fused=fused)
    checkpoint = Checkpoint.open(tmp_path)
    blueprint = build_blueprint(checkpoint.config, source=name, tensors=checkpoint.tensors)
    instance = ModelInstance(blueprint, checkpoint, device=torch.device("cpu"), dtype=torch.bfloat16)
    whole = instance.whole_model()
    for key, parameter in model.named_parameters():
        assert torch.equal(whole.get_parameter(key), parameter), key


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_mixture(tmp_path, "mixtral")
    checkpoint = Checkpoint.open(tmp_path)
    blueprint = build_blueprint(checkpoint.config, source="mixtral", tensors=checkpoint.tensors)
    tensors = dict(checkpoint.tensors)
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    object.__setattr__(checkpoint, "tensors", tensors)
    instance = ModelInstance(blueprint, checkpoint, device=torch.device("cpu"), dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.2\.w3\.weight"):
        instance.block(1)


@pytest.mark.parametrize("name", MIXTURES)
def test_routers_and_gates_stay_with_their_reason(name: str) -> None:
    blueprint = describe(lambda: random_mixture(name))
    assert blueprint.routed
    projections = {p.name for p in blueprint.projections()}
    assert blueprint.routers
    assert not blueprint.routers & projections
    for router in blueprint.routers:
        assert blueprint.kept[router].reason in ("router of 4 experts", "gate of the shared expert")
    shared = {router for router in blueprint.routers if router.endswith("shared_expert_gate")}
    assert bool(shared) == (name in ("qwen2-moe", "qwen3.5-moe", "qwen3-next"))
