"""Modules that plans keep because a server builds them in 16 bits; notes on linears that servers fuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lab.models.families import families, random_model
from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import UnsupportedError
from marlinq.models import build_blueprint
from marlinq.operations.inspect.servers import built_plain
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.plan_notes import fused_notes
from marlinq.operations.quantize.planning import OutputPlan, plan_output
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.original_folders import save_tiny
from tests.testing.tiny_models import tiny_model

SKIPPED = Override(r"q_proj$", skip=True)


def planned(folder: Path, *overrides: Override) -> tuple[OutputPlan, list[str]]:
    """The plan of a folder's model, and what is noted of it."""
    checkpoint = Checkpoint.open(folder)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    plan = plan_output(checkpoint, blueprint, Recipe(method="rtn", group_size=32, overrides=overrides))
    return plan, fused_notes(blueprint, plan)


def test_linears_that_servers_build_plain_stay_unless_they_are_named(tmp_path: Path) -> None:
    random_model(next(each for each in families() if each.model_type == "jamba")).save_pretrained(tmp_path)
    plan, _ = planned(tmp_path)
    mixer = next(name for name in plan.kept if name.endswith("mamba.in_proj"))
    assert built_plain("JambaForCausalLM", mixer)
    assert not built_plain("LlamaForCausalLM", mixer)
    assert "vLLM 0.33.0 builds it in 16 bits" in plan.kept[mixer].reason
    named, _ = planned(tmp_path, Override(r"mamba\.in_proj$", settings={"symmetric": True}))
    assert mixer in named.modules


@pytest.mark.parametrize(
    ("overrides", "noted"),
    [((), False), ((SKIPPED,), True), ((Override(r"\.[qkv]_proj$", skip=True),), False)],
)
def test_one_of_several_fused_linears_is_noted(
    tmp_path: Path, overrides: tuple[Override, ...], noted: bool
) -> None:
    _, notes = planned(save_tiny("llama", tmp_path / "model"), *overrides)
    assert bool(notes) == noted
    if noted:
        assert "q_proj not quantised, k_proj int4" in notes[0]
        assert r"--override 'self_attn\.(q_proj|k_proj|v_proj)$=...'" in notes[0]


@pytest.mark.parametrize(
    ("in_features", "settings", "advised"),
    [
        # 4-bit codes fill words of eight in every format.
        (100, {}, {}),
        (100, {"scheme": "int8", "format": "compressed-tensors"}, {"group_size": ["-1"]}),
        (104, {}, {"group_size": ["-1"]}),
        (
            104,
            {"format": "marlin", "group_size": -1},
            {"format": ["gptq", "gptq-v2", "awq", "compressed-tensors"]},
        ),
        (
            100,
            {"scheme": "mxfp4", "format": "compressed-tensors"},
            {"scheme": ["fp8", "fp8-dynamic", "fp8-static", "fp8-block"]},
        ),
        # The override decides the group size, whatever --group-size says.
        (96, {"overrides": (Override("down_proj", settings={"group_size": 64}),)}, {}),
    ],
)
def test_a_refusal_names_the_options_that_work(
    tmp_path: Path, in_features: int, settings: dict[str, Any], advised: dict[str, list[str]]
) -> None:
    tiny_model("llama", intermediate_size=in_features, num_hidden_layers=1).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    blueprint = build_blueprint(checkpoint.config, source="model", tensors=checkpoint.tensors)
    recipe = Recipe(method="rtn", **settings)
    with pytest.raises(UnsupportedError) as refusal:
        plan_output(checkpoint, blueprint, recipe)
    advice = re.findall(r"--(\S+) (\S+(?: or (?!keep)\S+)*)", str(refusal.value).partition("; ")[2])
    named = {option.replace("-", "_"): values.rstrip(",").split(" or ") for option, values in advice}
    module = named.pop("override")[0].strip("'").removesuffix("=skip")
    assert named == advised
    ways = [{key: int(each) if key == "group_size" else each} for key in named for each in named[key]]
    for changes in [
        *ways,
        {"overrides": (Override(module, skip=True), Override("mlp|[kv]_proj", skip=True))},
    ]:
        assert plan_output(checkpoint, blueprint, recipe.replace(**changes)).modules
