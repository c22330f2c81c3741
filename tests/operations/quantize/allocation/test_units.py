"""Units follow the loader's rules, and their bytes are those of the plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import MarlinqError, UnsupportedError, UsageError
from marlinq.models import Blueprint, build_blueprint
from marlinq.operations.quantize.allocation.allocate import with_choice
from marlinq.operations.quantize.allocation.units import Unit, units_of
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.mixtures import save_mixture
from tests.testing.original_folders import save_tiny

TARGET = Recipe(format="compressed-tensors", target_bits=5.0)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Blueprint]:
    return _opened(save_tiny("llama", tmp_path_factory.mktemp("llama") / "model"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Blueprint]:
    folder = tmp_path_factory.mktemp("mixture") / "model"
    save_mixture(folder, "qwen3-moe")
    return _opened(folder)


def _opened(folder: Path) -> tuple[Checkpoint, Blueprint]:
    checkpoint = Checkpoint.open(folder)
    return checkpoint, build_blueprint(
        checkpoint.config, source=str(folder), tensors=checkpoint.tensors, trust_remote_code=False
    )


def _inside(units: tuple[Unit, ...], block: int) -> dict[str, list[str]]:
    stem = f"model.layers.{block}."
    return {
        unit.name.removeprefix(stem): [each.name.removeprefix(stem) for each in unit.projections]
        for unit in units
        if unit.name.startswith(stem)
    }


def _options(unit: Unit) -> list[str]:
    return [option.candidate for option in unit.options]


def test_vllm_needs_one_scheme_for_fused_linears(llama: tuple[Checkpoint, Blueprint]) -> None:
    units = units_of(*llama, TARGET)
    assert _inside(units, 1) == {
        "self_attn.qkv_proj": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "self_attn.o_proj": ["self_attn.o_proj"],
        "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"],
        "mlp.down_proj": ["mlp.down_proj"],
    }
    # K is 64, of down_proj 128.
    assert _options(units[0]) == ["int4/64", "int4/32", "int8", "fp8", "unquantised"]
    assert _options(units[3]) == ["int4/128", "int4/64", "int4/32", "int8", "fp8", "unquantised"]
    assert "fp8" not in _options(units_of(*llama, TARGET.replace(format="gptq"))[0])


def test_linears_that_no_kernel_of_the_loader_takes_stay_unquantised(
    llama: tuple[Checkpoint, Blueprint],
) -> None:
    units = units_of(*llama, TARGET.replace(served_by="sglang"))
    assert _options(units[0]) == ["fp8", "unquantised"]
    assert units[0].refused["int4/32"].startswith("no kernel takes model.layers.0.self_attn.qkv_proj: Marlin")
    assert "int4/64" in _options(units[3])


def test_transformers_has_a_scheme_for_each_linear(llama: tuple[Checkpoint, Blueprint]) -> None:
    units = units_of(*llama, TARGET.replace(served_by="transformers"))
    assert _inside(units, 0) == {
        name: [name]
        for name in (
            *(f"self_attn.{part}_proj" for part in "qkvo"),
            *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
        )
    }


def test_experts_of_a_layer_are_one_unit(mixture: tuple[Checkpoint, Blueprint]) -> None:
    for server in ("vllm", "transformers"):
        units = units_of(*mixture, TARGET.replace(served_by=server))
        experts = next(unit for unit in units if unit.name == "model.layers.1.mlp.experts")
        assert len(experts.projections) == 3 * len({each.expert for each in experts.projections})
        assert experts.members == ("model.layers.1.mlp.experts",)


def test_bytes_of_a_choice_are_those_of_the_plan(
    llama: tuple[Checkpoint, Blueprint], mixture: tuple[Checkpoint, Blueprint]
) -> None:
    for (checkpoint, blueprint), form in ((llama, "compressed-tensors"), (llama, "gptq"), (mixture, "gptq")):
        recipe = TARGET.replace(format=form)
        units = units_of(checkpoint, blueprint, recipe)
        totals = set()
        for turn in range(4):
            chosen = [(number + turn) % len(unit.options) for number, unit in enumerate(units)]
            plan = plan_output(checkpoint, blueprint, with_choice(recipe, units, chosen))
            taken = sum(unit.options[index].nbytes for unit, index in zip(units, chosen, strict=True))
            totals.add(sum(tensor.nbytes for tensor in plan.tensors) - taken)
            for unit, index in zip(units, chosen, strict=True):
                for planned in unit.options[index].planned:
                    assert plan.modules[planned.projection.name].spec == planned.spec
        # Modules outside the choice take the same bytes for every choice.
        assert len(totals) == 1


def test_overrides_win_and_are_in_no_unit(llama: tuple[Checkpoint, Blueprint]) -> None:
    recipe = TARGET.replace(
        overrides=(Override.parse("layers.0.*down=group_size=32"), Override.parse("v_proj=skip"))
    )
    units = units_of(*llama, recipe)
    assert "mlp.down_proj" not in _inside(units, 0)
    # q and k can no longer be fused with v.
    assert _inside(units, 1)["self_attn.q_proj"] == ["self_attn.q_proj"]
    chosen = with_choice(recipe, units, [0] * len(units))
    assert chosen.rules.outcome("model.layers.0.mlp.down_proj").reason.startswith("override")  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match="overrides decide every linear"):
        units_of(*llama, TARGET.replace(overrides=(Override.parse("proj=scheme=int8"),)))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"target_bits": 4.5, "target_size": 1000}, "target_size: target_bits is given too; keep one"),
        ({"target_size": "6 parsecs"}, "target_size: expected a size such as 6GB or 512MiB"),
        ({"scheme": "int8"}, "scheme: target_bits chooses the scheme of each module; leave it out"),
        ({"group_size": 64}, "group_size: target_bits chooses the scheme of each module"),
        ({"format": "awq"}, "target_bits: awq does not hold schemes that differ between modules; expected"),
        ({"format": "marlin"}, "target_bits: marlin does not hold schemes"),
        ({"target_bits": 17.0}, "target_bits: expected a number of bits above 0 and up to 16"),
        ({"target_bits": "none", "target_size": 0}, "target_size: expected a whole number of at least 1"),
        ({"allocation": {"int3": []}}, "allocation: expected one of int4/128"),
        ({"allocation": {"int8": "x"}}, "allocation: int8: expected a list of modules"),
        ({"allocation": {"int8": ["x"], "fp8": ["x"]}}, "allocation: 'x' is there twice"),
    ],
)
def test_recipes_that_contradict_themselves(changes: dict[str, object], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        TARGET.replace(**changes)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"served_by": "transformers", "format": "gptq"}, "does not read rules for single modules"),
        ({"symmetric": False, "format": "gptq"}, "vLLM does not load int4 asymmetric weights"),
    ],
)
def test_loaders_that_take_no_candidate(
    llama: tuple[Checkpoint, Blueprint], changes: dict[str, object], line: str
) -> None:
    with pytest.raises(MarlinqError) as caught:
        units_of(*llama, TARGET.replace(**changes))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_allocation_is_dropped_with_its_target() -> None:
    chosen = TARGET.replace(allocation={"int8": ("a",)})
    assert Recipe.from_dict(chosen.to_dict()) == chosen
    assert chosen.replace(target_bits=5.0, seed=1).allocation == {"int8": ("a",)}
    for change in ({"target_bits": 6.0}, {"served_by": "marlinq"}):
        assert chosen.replace(**change).wants_allocation


def test_another_target_takes_the_place_of_a_recipes() -> None:
    sized = TARGET.replace(target_size="3KiB")
    assert (sized.target_bits, sized.target_size) == ("none", 3072)
    assert Recipe.from_dict({**sized.to_dict(), "target_size": "3072"}) == sized
    assert sized.replace(target_bits=4.5).target_size == "none"


def test_an_allocation_stays_with_its_target_loader_and_format() -> None:
    chosen = TARGET.replace(allocation={"int8": ("x",)})
    assert chosen.replace(seed=3).allocation
    for changes in ({"target_bits": 6.0}, {"target_size": 9}, {"served_by": "sglang"}, {"format": "gptq"}):
        assert not chosen.replace(**changes).allocation
    # Nothing would choose another.
    by_hand = chosen.replace(target_bits="none")
    assert by_hand.allocation
    assert by_hand.replace(format="gptq", served_by="sglang").allocation
