"""Whole runs with a target, and what they were chosen by."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from marlinq.calibration import Document, make_batches
from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import OutputError, UsageError
from marlinq.models import ModelInstance, build_blueprint
from marlinq.operations.inspect import inspect
from marlinq.operations.quantize import plan_quantize, quantize, quantize_model
from marlinq.operations.quantize.allocation import allocate as allocating
from marlinq.operations.quantize.allocation import stored_allocation
from marlinq.operations.quantize.allocation.sensitivity import MeasuringText, measure
from marlinq.operations.quantize.allocation.units import units_of
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.prepare import plan_run
from marlinq.operations.quantize.quantize_report import QuantizeReport
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.verify import verify
from marlinq.runtime import load
from tests.operations.quantize.tuning.runs import dies
from tests.testing.interrupted import Killed
from tests.testing.original_folders import READ, ROWS, folder_bytes, save_tiny

TARGET = READ.replace(format="compressed-tensors", group_size="auto", target_bits=5.0)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Run:
    """A finished run with a target."""

    source: Path
    out: Path
    report: QuantizeReport


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("allocated")
    source = save_tiny("llama", folder / "model")
    return Run(source, folder / "out", quantize(source, folder / "out", recipe=TARGET, device="cpu"))


def test_an_allocated_model_is_verified_inspected_and_loaded(run: Run) -> None:
    found = run.report.allocation
    assert found is not None
    assert 4.8 < found.bits <= 5.0
    assert found.nbytes == run.report.output_bytes
    assert len(run.report.schemes) > 1
    assert all(found.kl <= each.kl for each in found.uniform.values() if each.bits <= 5.0)
    assert verify(run.out, against=run.source).ok
    vllm = next(each for each in inspect(run.out).servers if each.server == "vLLM")
    assert vllm.loads
    with torch.no_grad():
        assert load(run.out).model(torch.arange(8)[None]).logits.isfinite().all()
    assert "gradients of the loss" in run.report.render()


def test_the_recipe_of_the_manifest_gives_the_same_tensors_and_measures_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocating, "measure", None)
    manifest = json.loads((run.out / "marlinq.json").read_text())
    assert manifest["allocation"]["target"] == "5 bits"
    report = quantize(
        run.source, tmp_path / "again", recipe=Recipe.from_dict(manifest["recipe"]), device="cpu"
    )
    assert report.allocation is None
    once, again = folder_bytes(run.out), folder_bytes(tmp_path / "again")
    assert {name for name in once if once[name] != again[name]} == {"marlinq.json"}


def test_an_interrupted_run_takes_its_allocation_over(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:

        def stop(*args: object, **settings: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(quantize_model, "solve", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize(run.source, out, recipe=TARGET, device="cpu")
    with pytest.raises(OutputError, match="an unfinished run with other settings"):
        quantize(run.source, out, recipe=TARGET.replace(target_bits=6.0), device="cpu", resume=True)
    monkeypatch.setattr(allocating, "measure", None)
    report = quantize(run.source, out, recipe=TARGET, device="cpu", resume=True)
    assert report.allocation == run.report.allocation
    assert folder_bytes(out) == folder_bytes(run.out)


def test_schemes_chosen_on_other_text_are_not_taken_over(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, text = tmp_path / "out", tmp_path / "text.jsonl"
    text.write_bytes(ROWS.read_bytes())
    recipe = TARGET.replace(calibration=str(text))
    with monkeypatch.context() as patch:
        patch.setattr(quantize_model, "gather_text", dies)
        with pytest.raises(Killed):
            quantize(run.source, out, recipe=recipe, device="cpu")
    text.write_text(text.read_text().replace("[", "[4, "))
    with pytest.raises(OutputError, match=r"text\.jsonl gives other text than the interrupted run had"):
        quantize(run.source, out, recipe=recipe, device="cpu", resume=True)


def test_resuming_a_finished_run_with_a_target_returns_its_report(run: Run) -> None:
    report = quantize(run.source, run.out, recipe=TARGET, device="cpu", resume=True)
    assert report.modules == run.report.modules
    with pytest.raises(OutputError, match="was not written by this recipe"):
        quantize(run.source, run.out, recipe=TARGET.replace(target_bits=6.0), device="cpu", resume=True)


@pytest.mark.parametrize(
    "forged",
    [
        {"kl": None},
        {"kl": "0.1"},
        {"kl": float("inf")},
        {"kl": -1.0},
        {"units": 10**400},
        {"exact": 1},
        {"uniform": {"int8": {"bits": "x", "nbytes": 1, "kl": 0.1}}},
        {"uniform": {"\x1b[2J": {"bits": 1.0, "nbytes": 1, "kl": 0.1}}},
    ],
)
def test_forged_allocations_of_unfinished_runs_are_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forged: dict[str, object]
) -> None:
    assert run.report.allocation is not None
    kept = {"recipe": stored_allocation._asked(TARGET), "allocation": asdict(run.report.allocation)}
    monkeypatch.setattr(stored_allocation, "kept_json", lambda *_: kept)
    assert stored_allocation.kept_allocation(tmp_path, TARGET) == run.report.allocation
    # The target is the recipe's, whatever was kept.
    kept["allocation"] |= {"target": ["a"]}
    assert stored_allocation.kept_allocation(tmp_path, TARGET) == run.report.allocation
    kept["allocation"] |= forged
    with pytest.raises(OutputError, match="is damaged; remove"):
        stored_allocation.kept_allocation(tmp_path, TARGET)


def test_sizes_of_an_unfinished_run_are_those_of_its_plan(run: Run, tmp_path: Path) -> None:
    assert run.report.allocation is not None
    forged = replace(run.report.allocation, bits=1.0, nbytes=5)
    checkpoint = Checkpoint.open(run.source)
    decisions = plan_run(
        checkpoint,
        TARGET,
        CPU,
        trust_remote_code=False,
        progress=lambda *_: None,
        message=lambda _: None,
        allocation=forged,
    )
    assert decisions.allocation == run.report.allocation


@pytest.mark.parametrize(
    ("allocation", "target", "line"),
    [
        ({}, {"target_bits": 4.6}, "takes 4.9.* bits a weight, .* bytes, more than the 4.6 bits asked for"),
        ({}, {"target_bits": "none", "target_size": 50_000}, "more than the 0.05 MB asked for"),
        ({"int8": ("model.layers.0",)}, {}, "has no scheme for model.layers.1.self_attn.q_proj"),
        ({"int8": ("model", "model.layers.77")}, {"target_bits": "none"}, "'model.layers.77' is no linear"),
        ({"int8": ("model", "")}, {"target_bits": "none"}, "'' is no linear of the model"),
    ],
)
def test_an_allocation_that_suits_another_model(
    run: Run, tmp_path: Path, allocation: dict[str, object], target: dict[str, object], line: str
) -> None:
    assert run.report.allocation is not None
    recipe = TARGET.replace(**target).replace(allocation=allocation or run.report.allocation.modules)
    with pytest.raises(UsageError, match=line) as caught:
        plan_quantize(run.source, tmp_path / "out", recipe=recipe, device="cpu")
    assert "leave out the allocation, and one is chosen" in str(caught.value)


def test_too_long_documents_are_warned_of_once(run: Run, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is cut to the model's") as warned:
        quantize(run.source, tmp_path / "out", recipe=TARGET.replace(max_length=10**6), device="cpu")
    assert len([each for each in warned if "is cut to the model's" in str(each.message)]) == 1


def test_a_plan_says_what_a_run_chooses(run: Run, tmp_path: Path) -> None:
    size = run.report.output_bytes
    recipe = TARGET.replace(target_bits="none", target_size=size)
    plan = plan_quantize(run.source, tmp_path / "out", recipe=recipe, device="cpu")
    assert plan.allocation is not None
    assert run.report.allocation is not None
    # The same bytes, asked for otherwise.
    assert plan.output_bytes <= size
    assert plan.allocation.kl <= run.report.allocation.kl
    assert plan.allocation.modules == run.report.allocation.modules
    assert not (tmp_path / "out").exists()
    assert json.loads(json.dumps(plan.to_dict()))["allocation"]["units"] == 12


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"target_bits": 4.2}, "target_bits 4.2: too small for the schemes that vllm takes"),
        (
            {"target_bits": 4.2, "served_by": "sglang"},
            "qkv_proj (and 8 more) gets no 4 bits: no kernel",
        ),
        ({"target_bits": 4.2, "overrides": (Override.parse("down=skip"),)}, "reachable are"),
        ({"target_bits": "none", "target_size": 100_000}, "too small for the schemes"),
        ({"target_bits": "none", "target_size": 10**9}, "nothing is left to choose; reachable are"),
        ({"target_bits": "none", "target_size": "3.9GiB"}, "target_size of 4187593113 bytes: all modules"),
    ],
)
def test_targets_out_of_reach(
    run: Run, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], line: str
) -> None:
    monkeypatch.setattr(allocating, "measure", None)
    with pytest.raises(UsageError) as caught:
        _allocate(run.source, TARGET.replace(**changes))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def _allocate(source: Path, recipe: Recipe) -> None:
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source=str(source), tensors=checkpoint.tensors)
    allocating.measure_sensitivities(
        checkpoint,
        blueprint,
        recipe,
        CPU,
        plan_of=partial(plan_output, checkpoint, blueprint),
        trust_remote_code=False,
        progress=lambda *_: None,
        message=lambda _: None,
    )


def test_estimates_are_the_divergence_that_is_measured(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source=str(source), tensors=checkpoint.tensors)
    # Its errors depend on the weights alone.
    recipe = TARGET.replace(method="rtn")
    units = units_of(checkpoint, blueprint, recipe)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 128, (64, 32), generator=generator)
    batches = make_batches([Document(tuple(row.tolist())) for row in ids], token_budget=128)
    instance = ModelInstance(blueprint, checkpoint, device=CPU, dtype=torch.float32)
    costs = measure(
        instance,
        units,
        recipe,
        MeasuringText(batches, batches),
        products=None,
        folder=tmp_path,
        progress=lambda *_: None,
    )
    model = load(source, device="cpu", dtype="float32").model
    with torch.no_grad():
        original = F.log_softmax(model(ids).logits, dim=-1)
        estimated, measured = [], []
        for unit, of_unit in zip(units, costs, strict=True):
            weights = [model.get_parameter(each.parameter) for each in unit.projections]
            before = [weight.clone() for weight in weights]
            for planned, weight in zip(unit.options[0].planned, weights, strict=True):
                solved = planned.method.solve(
                    [weight], None, planned.spec.scheme, planned.options, names=["w"]
                )
                weight.copy_(solved[0][0].dequantize())
            predicted = F.log_softmax(model(ids).logits, dim=-1)
            divergence = F.kl_div(predicted, original, reduction="none", log_target=True).sum(-1)
            estimated.append(of_unit[0])
            measured.append(float(divergence.mean()))
            for weight, old in zip(weights, before, strict=True):
                weight.copy_(old)
    ratios = [guess / found for guess, found in zip(estimated, measured, strict=True)]
    # A unit's estimate is a mean of squares: of some 16 batches and 192 output channels or more, few of which
    # count as much as others. Ratios that were seen are 0.92 to 1.16.
    assert all(0.75 < ratio < 1.33 for ratio in ratios)
    assert 0.9 < sum(estimated) / sum(measured) < 1.1
