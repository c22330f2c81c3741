"""``--sparsity 2:4``: which modules are pruned, and where it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.errors import UsageError
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.models import build_blueprint
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.original_folders import READ, save_tiny

SPARSE = READ.replace(sparsity="2:4", format="compressed-tensors")


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_pruned_modules_are_sparse_and_said_to_be(tmp_path: Path, method: str) -> None:
    source = save_tiny("llama", tmp_path / "model")
    dense = Override.parse("down_proj=sparsity=none")
    report = quantize(
        source, tmp_path / "out", recipe=SPARSE.replace(method=method, overrides=(dense,)), device="cpu"
    )
    view = QuantizedCheckpoint.of(Checkpoint.open(tmp_path / "out"))
    assert view is not None
    for name, module in report.modules.items():
        sparse = not name.endswith("down_proj")
        assert (TWO_OF_FOUR.refusal(view.load(name).used()) is None) == sparse, name
        assert module.sparsity == ("2:4" if sparse else None)
        assert module.scheme.endswith(", 2:4 sparse") == sparse
    dense_ones = sum(name.endswith("down_proj") for name in report.modules)
    pruned = len(report.modules) - dense_ones
    shown = str(report.display())
    assert f"{pruned} linears to 2:4" in shown
    assert f"median of the {dense_ones} dense ones" in shown
    manifest = json.loads((tmp_path / "out" / "marlinq.json").read_text())
    assert manifest["recipe"]["sparsity"] == "2:4"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{pruned} linears as int4, groups of 32, symmetric, 2:4 sparse" in card
    # A dense layout's config says nothing of it, so one group of modules is enough.
    assert len(view.config.raw["config_groups"]) == 1


@pytest.mark.parametrize(("overrides", "pruned"), [((), None), (("lm_head=sparsity=2:4",), TWO_OF_FOUR)])
def test_only_its_own_override_prunes_the_head(
    tmp_path: Path, overrides: tuple[str, ...], pruned: object
) -> None:
    source = Checkpoint.open(save_tiny("llama", tmp_path / "model"))
    blueprint = build_blueprint(source.config, source="model", tensors=source.tensors)
    recipe = SPARSE.replace(quantize_head="int4", overrides=tuple(map(Override.parse, overrides)))
    plan = plan_output(source, blueprint, recipe)
    assert plan.head is not None
    assert {name: one.spec.scheme.sparsity for name, one in plan.modules.items()} == {
        name: pruned if one is plan.head else TWO_OF_FOUR for name, one in plan.modules.items()
    }


def test_the_card_names_no_server_that_lacks_the_layout(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    # Marlin-24 wants N in multiples of 64, which k and v are not.
    narrow = Override.parse("self_attn=skip")
    recipe = SPARSE.replace(method="rtn", format="marlin-24", overrides=(narrow,))
    quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "marlinq generate ." in card
    assert "vllm serve" not in card


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"scheme": "fp8", "method": "rtn", "sparsity": "2:4", "format": "fp8"},
            "fp8 weights are not pruned",
        ),
        (
            {"sparsity": "2:4", "format": "gptq-marlin-24", "quantize_head": "int4"},
            "can't hold dense weights; .* or marlin-24",
        ),
        ({"method": "imatrix", "sparsity": "2:4"}, "imatrix does not prune"),
        ({"sparsity": "1:4"}, "sparsity: expected one of none, 2:4, found '1:4'"),
    ],
)
def test_settings_that_cannot_be_pruned_are_refused(settings: dict[str, str], message: str) -> None:
    group_size = "auto" if settings.get("scheme") == "fp8" else 32
    with pytest.raises(UsageError, match=message):
        Recipe.from_dict({"group_size": group_size, **settings})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sparsity": "none"}, "marlin-24 is for 2:4 sparse weights; add sparsity 2:4"),
        ({"symmetric": False}, "marlin-24 can't hold asymmetric weights"),
    ],
)
def test_requirements_of_a_sparse_layout(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SPARSE.replace(format="marlin-24", **changes)
