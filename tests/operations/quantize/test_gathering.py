"""Statistics of projections that write to the residual stream, against sums of the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from marlinq.calibration import Batch, HiddenStates
from marlinq.core.granularity import Granularity
from marlinq.formats import LAYOUTS, ModuleSpec
from marlinq.methods import GPTQ, GPTQOptions
from marlinq.models import BlockReplay, ModelInstance, build_blueprint
from marlinq.operations.quantize.gathering import Gathering
from marlinq.operations.quantize.original import OriginalStates
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.ranks import ALONE
from tests.testing.schemes import scheme
from tests.testing.tiny_models import in_memory, tiny_model

CPU = torch.device("cpu")
BLOCK = "model.layers.1"
QKV = tuple(f"{BLOCK}.self_attn.{each}_proj" for each in "qkv")
O_PROJ, DOWN = f"{BLOCK}.self_attn.o_proj", f"{BLOCK}.mlp.down_proj"
GATE_UP = (f"{BLOCK}.mlp.gate_proj", f"{BLOCK}.mlp.up_proj")
BATCHES = [
    Batch(torch.arange(3, 43).reshape(2, 20), (20, 13)),
    Batch(torch.arange(50, 66).reshape(2, 8), (8, 8)),
    Batch(torch.arange(70, 76).reshape(1, 6), (6,)),
]
TOKENS = 55


@dataclass
class Scene:
    """A block whose input has drifted, in the quantised model, from the original's."""

    gathering: Gathering
    members: list[PlannedModule]
    instance: ModelInstance
    replay: BlockReplay
    drifted: HiddenStates
    original: list[Tensor]

    def tensors(self, hidden: Tensor, batch: int) -> dict[str, Tensor]:
        """Inputs by name, ``mid`` and ``out``, the stream within the block and behind it: [tokens, ...]."""
        found: dict[str, Tensor] = {}
        norm = self.instance.model.get_submodule(f"{BLOCK}.post_attention_layernorm")
        handle = norm.register_forward_pre_hook(lambda _, args: found.__setitem__("mid", args[0]))
        projections = [planned.projection for planned in self.members]
        output = self.replay.inputs(1, batch, hidden, projections, found.__setitem__)
        handle.remove()
        assert output is not None
        found["out"] = output
        mask = BATCHES[batch].mask()
        return {name: tensor[mask].double() for name, tensor in found.items()}


@pytest.fixture
def scene(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    compared: list[int] = request.param
    model = tiny_model("llama")
    blueprint = build_blueprint(model.config.to_dict(), source="llama")
    instance = ModelInstance(blueprint, in_memory(model), device=CPU, dtype=torch.float32)
    replay = BlockReplay(instance)
    original = list(replay.record(batch.ids for batch in BATCHES))
    generator = torch.Generator().manual_seed(3)

    def states(numbers: list[int], noise: float) -> HiddenStates:
        found = HiddenStates(
            [tuple(original[number].shape) for number in numbers],
            dtype=torch.float32,
            device=CPU,
            limit_bytes=1 << 30,
            folder=tmp_path,
        )
        for place, number in enumerate(numbers):
            drift = noise * torch.randn(original[number].shape, generator=generator)
            found.store(place, original[number] * (1 - noise) + drift)
        return found

    method, options = GPTQ(), GPTQOptions()
    members = [
        PlannedModule(
            each,
            each.name,
            each.parameter,
            method,
            options,
            LAYOUTS["gptq"],
            ModuleSpec(each.in_features, each.out_features, scheme(32)),
            "",
            Granularity.group(32),
        )
        for each in blueprint.blocks[1].projections
    ]
    gathering = Gathering(instance, replay, BATCHES, ALONE)
    gathering.original = OriginalStates(instance, replay, states(compared, 0.0), compared)
    with instance.loaded(BLOCK):
        yield Scene(gathering, members, instance, replay, states([0, 1, 2], 0.05), original)


def products(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The mean of 2 left^T right over all tokens, float64."""
    tokens = sum(len(left) for left, _ in pairs)
    return sum((2 / tokens * left.t() @ right for left, right in pairs), torch.zeros(()).double())


def rms(stream: Tensor) -> Tensor:
    return stream.square().mean(dim=-1, keepdim=True).sqrt()


def assert_near(found: Tensor | None, expected: Tensor) -> None:
    assert found is not None
    # Sums of some fifty float32 products, of tensors that were rounded through two layers before.
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("scene", [[0, 1, 2], [0, 2]], ids=["all compared", "two compared"], indirect=True)
def test_streams_are_compared_where_projections_write_to_them(scene: Scene) -> None:
    gathering, drifted = scene.gathering, scene.drifted
    assert gathering.original is not None
    compared = [number for number in range(3) if gathering.original.has(number)]
    now = [scene.tensors(drifted.load(number), number) for number in range(3)]
    before = [scene.tensors(scene.original[number], number) for number in range(3)]

    gathered = gathering.gather(1, scene.members, drifted)
    assert gathered.groups == [QKV, (O_PROJ,), GATE_UP]
    assert gathered.late == [(DOWN,)]
    statistics = gathered.statistics
    # Where the difference is, and by what a token's input and difference are divided.
    for name, left in ((QKV[0], QKV[0]), (O_PROJ, "mid"), (GATE_UP[0], GATE_UP[0])):
        sizes = [rms(each["mid"]).sqrt() if left == "mid" else torch.ones(1) for each in now]
        inputs = [each[name] / size for each, size in zip(now, sizes, strict=True)]
        drifts = [(before[number][left] - now[number][left]) / sizes[number] for number in compared]
        assert_near(statistics[name].hessian(), products([(x, x) for x in inputs]))
        assert_near(
            statistics[name].drift(),
            products([(drift, inputs[number]) for drift, number in zip(drifts, compared, strict=True)]),
        )
        assert statistics[name].tokens == TOKENS
        assert statistics[name].pairs == sum(len(drift) for drift in drifts)
        assert statistics[name].of_stream == (name == O_PROJ)

    # Others are rounded: what they do shows in the input and in the stream.
    for planned in scene.members:
        if planned.projection.name != DOWN:
            weight = scene.instance.weight(planned.projection)
            scene.instance.replace(planned.projection, (weight * 8).round() / 8)
    rounded = [scene.tensors(drifted.load(number), number) for number in range(3)]
    gathering.gather_late(1, scene.members, drifted, gathered)
    seen = [(rounded if number in compared else now)[number] for number in range(3)]
    inputs = [each[DOWN] / rms(each["out"]).sqrt() for each in seen]
    assert_near(statistics[DOWN].hessian(), products([(x, x) for x in inputs]))
    pairs = [
        (
            (before[number]["out"] - rounded[number]["out"]) / rms(rounded[number]["out"]).sqrt(),
            inputs[number],
        )
        for number in compared
    ]
    assert_near(statistics[DOWN].drift(), products(pairs))
    assert statistics[DOWN].tokens == TOKENS
    assert float((rounded[0]["out"] - now[0]["out"]).norm()) > 0.01 * float(now[0]["out"].norm())


@pytest.mark.parametrize("scene", [[0, 1, 2]], indirect=True)
def test_the_original_goes_on_to_the_next_block(scene: Scene) -> None:
    scene.gathering.gather(1, scene.members, scene.drifted)
    original = scene.gathering.original
    assert original is not None
    for number, hidden in enumerate(scene.original):
        assert torch.equal(original.output(number), scene.replay.run(1, number, hidden))
