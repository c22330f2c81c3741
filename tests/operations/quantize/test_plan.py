"""A run does as ``--plan`` says."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from marlinq.checkpoint import Checkpoint, ReadAhead
from marlinq.core.errors import UnsupportedError
from marlinq.operations.inspect import inspect
from marlinq.operations.quantize import plan_quantize, quantize
from marlinq.operations.quantize.budget import (
    TextBudget,
    Work,
    states_on_device,
    text_budget,
    tuning_budget,
    tuning_rates,
)
from marlinq.operations.quantize.estimate import RunEstimate
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.pace import Pace
from marlinq.operations.quantize.plan_report import TENSOR_PARALLEL, Fate, _fate_table
from marlinq.operations.quantize.tuning import TuningSettings
from marlinq.operations.quantize.tuning.text_rows import NOISE
from tests.testing.mixtures import save_mixture
from tests.testing.original_folders import RECIPE, ROWS, save_tiny

# Rules of single modules are what is tested, not whether a server takes them.
pytestmark = pytest.mark.filterwarnings("ignore:.*make one layer of them")

CPU = torch.device("cpu")


# A GPU with little free memory gives a quarter, a middle one 2 GiB, a large one an eighth.
@pytest.mark.parametrize(("free", "kept"), [(4 << 30, 1 << 30), (12 << 30, 2 << 30), (128 << 30, 16 << 30)])
def test_hidden_states_that_stay_on_a_gpu(monkeypatch: pytest.MonkeyPatch, free: int, kept: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    assert states_on_device(torch.device("cuda")) == kept
    assert states_on_device(CPU) == 0


@pytest.mark.parametrize("layout", ["gptq", "gptq-v2", "compressed-tensors"])
def test_the_plan_is_what_the_run_does(tmp_path: Path, layout: str) -> None:
    source = save_tiny("llama", tmp_path / "model")
    recipe = RECIPE.replace(
        format=layout,
        overrides=(Override.parse("layers.1.=skip"), Override.parse("(gate|up)_proj=group_size=64")),
    )
    plan = plan_quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    report = quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    quantised = {fate.name: fate for fate in plan.fates if fate.nbytes is not None}
    assert {name: fate.becomes for name, fate in quantised.items()} == {
        name: module.scheme for name, module in report.modules.items()
    }
    assert {name: fate.reason for name, fate in quantised.items()} == {
        name: module.reason for name, module in report.modules.items()
    }
    kept = {fate.name: fate.reason for fate in plan.fates if fate.nbytes is None}
    assert kept == {name: keep.reason for name, keep in report.kept.items()}
    assert (plan.source_bytes, plan.output_bytes) == (report.source_bytes, report.output_bytes)
    # Servers are judged as ``inspect`` judges the finished folder.
    for parts in TENSOR_PARALLEL:
        assert plan.servers[parts] == inspect(tmp_path / "out", tensor_parallel=parts).servers
    sizes = {module.name: module.nbytes for module in inspect(tmp_path / "out", modules=True).modules or ()}
    assert {name: fate.nbytes for name, fate in quantised.items()} == sizes


def test_no_weight_is_read_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_tiny("llama-tied", tmp_path / "model")
    before = sorted(tmp_path.rglob("*"))

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "tensor", forbidden)
    monkeypatch.setattr(ReadAhead, "tensor", forbidden)
    plan = plan_quantize(source, tmp_path / "out", recipe=RECIPE, device="cpu")
    assert sorted(tmp_path.rglob("*")) == before
    text = plan.render()
    assert "model.layers.*.self_attn.q_proj 0-1 64 64 int4, groups of 32" in " ".join(text.split())
    assert "embedding: a table that is looked up" in text
    assert "320 tokens that the model writes itself (as asked for)" in text
    assert "1 GPU" in text
    assert "8 GPUs" in text
    values = json.loads(json.dumps(plan.to_dict()))
    assert len(values["fates"]) == len(plan.fates)
    assert set(values["servers"]) == {"1", "2", "4", "8"}
    assert values["estimate"]["seconds"] > 0


def test_modules_whose_names_differ_in_numbers_share_a_row() -> None:
    """Those of the name's end too, as of a list of heads."""
    names = [*(f"talker.lm_head.{i}" for i in (0, 1, 2, 4)), "model.layers.3.mlp.up_proj", "lm_head"]
    table = _fate_table([Fate(name, None, None, "kept", "carried", None) for name in names])
    assert [row[:2] for row in table.rows] == [
        ("talker.lm_head.*", "0-2, 4"),
        ("model.layers.*.mlp.up_proj", "3"),
        ("lm_head", ""),
    ]


def test_an_output_that_no_server_loads_is_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    source = save_tiny("llama", tmp_path / "model")
    recipe = RECIPE.replace(method="rtn", format="gptq", group_size=64, symmetric=False)
    plan_quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    (told,) = [str(each.message) for each in recwarn if "no server loads" in str(each.message)]
    assert "no server loads gptq with these settings, only marlinq does (vLLM: " in told
    assert "--format compressed-tensors (vLLM" in told
    # In a format that it names, the same settings need no warning.
    recwarn.clear()
    loaded = recipe.replace(format="compressed-tensors")
    plan = plan_quantize(source, tmp_path / "out", recipe=loaded, device="cpu")
    # A run of no time has no part whose time is worth naming.
    instant = replace(plan, estimate=RunEstimate(**dict.fromkeys(asdict(plan.estimate), 0.0)))
    assert "on cpu in float32\n" in instant.render()
    assert not [each for each in recwarn if "no server" in str(each.message)]


def test_a_local_file_is_counted(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    recipe = RECIPE.replace(calibration=str(ROWS), max_length=64)
    plan = plan_quantize(source, tmp_path / "out", recipe=recipe, device="cpu")
    # Eight rows of forty tokens; the bound is eight of sixty-four.
    assert plan.tokens == 320
    assert f"320 tokens of {ROWS}" in plan.render()
    assert "at most" not in plan.render()
    assert "as an example: this plan is for the CPU" in plan.render()


def test_a_time_that_was_announced_too_short_is_said_anew() -> None:
    clock, said, seen = [0.0], [], []
    pace = Pace(20, lambda *step: seen.append(step), said.append, clock=lambda: clock[0])
    for seconds, done in ((5, 1), (12, 50), (20, 50), (40, 60), (41, 61), (200, 70), (300, 100)):
        clock[0] = seconds
        pace("writing text", done, 100)
    assert said == [
        "writing text: 50 of 100 in 20 s, slower than expected; about 20 s left",
        "writing text: 60 of 100 in 40 s, slower than expected; about 27 s left",
        "writing text: 70 of 100 in 3 min 20 s, slower than expected; about 1 min 26 s left",
    ]
    assert len(seen) == 7


def test_a_method_without_text_plans_none(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    plan = plan_quantize(source, tmp_path / "out", recipe=RECIPE.replace(method="rtn"), device="cpu")
    assert (plan.calibration, plan.tokens) == (None, 0)
    assert plan.estimate.writing_seconds == plan.estimate.block_seconds == plan.estimate.text_bytes == 0
    assert "none: the method needs no text" in plan.render()


def test_tuning_is_planned(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    plain, scales, codes = (
        plan_quantize(source, tmp_path / "out", recipe=RECIPE.replace(**changes), device="cpu")
        for changes in ({}, {"tune_steps": 900}, {"tune_steps": 9, "tune_codes": True, "tune_tokens": 1000})
    )
    assert (plain.estimate.tuning_seconds, plain.estimate.tuning_bytes) == (0, 0)
    # 110,592 weights. A micro-batch holds 25 rows of 40 tokens, so a step of 1000 keeps no gradients.
    assert (scales.estimate.tuning_bytes, codes.estimate.tuning_bytes) == (110_592, 14 * 110_592)
    for plan in (scales, codes):
        assert plan.estimate.tuning_seconds > 0
        assert plan.estimate.seconds > plan.estimate.tuning_seconds
    assert "tuning " in scales.render()


def test_gradients_of_the_loss_are_planned(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    plain, minding = (
        plan_quantize(source, tmp_path / "out", recipe=RECIPE.replace(output_hessian=on), device="cpu")
        for on in (False, True)
    )
    # Four times 8 documents of 40 tokens, 64 channels in float32, before, between and behind 3 blocks.
    assert minding.estimate.block_bytes - plain.estimate.block_bytes == 4 * 8 * 40 * 64 * 4 * (3 + 1)
    assert minding.tokens == plain.tokens == 8 * 40


def test_a_plan_refuses_what_the_run_would(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    with pytest.raises(UnsupportedError, match="marlin: "):
        plan_quantize(source, tmp_path / "out", recipe=RECIPE.replace(format="marlin"), device="cpu")


def test_a_cpu_gets_a_budget_of_its_own() -> None:
    smollm2 = Work(106_168_320, 134_479_872, 30 * 3_354_624, 30 * 192 * 4, 8192)
    llama_8b = Work(6_979_321_856, 7_504_658_432, 32 * 239_075_328, 131_072, 131_072)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        small = text_budget(RECIPE.replace(samples="auto", max_length=2048), smollm2, CPU, torch.bfloat16)
        large = text_budget(RECIPE.replace(samples="auto", max_length=2048), llama_8b, CPU, torch.bfloat16)
        torch.set_num_threads(64)
        server = text_budget(RECIPE.replace(samples="auto", max_length=2048), smollm2, CPU, torch.bfloat16)
    finally:
        torch.set_num_threads(before)
    assert 8192 <= small.tokens <= 16384
    assert large.tokens == 4096
    assert server.tokens == 128 * 2048 * 3 // 4
    for budget in (small, large, server):
        # Tokens of one round of the rows when documents end at three quarters of their length.
        assert budget.rows * budget.max_length * 0.75 >= 0.98 * budget.tokens
        assert budget.rows <= 128
        assert 256 <= budget.max_length <= 2048


def test_tuning_takes_what_was_asked_for_or_what_a_budget_allows() -> None:
    small, middle, large = (
        Work(10**8, 134 * 10**6, 10**6, 10**4, None),
        Work(10**9, 4 * 10**9, 10**9, 10**5, None),
        Work(29 * 10**9, 30 * 10**9, 10**9, 10**5, None),
    )
    cuda = torch.device("cuda")
    asked = RECIPE.replace(tune_steps=60)
    assert tuning_budget(asked, large, cuda, own_text=True) == (60, 8192)
    assert tuning_budget(asked.replace(tune_tokens=100), large, cuda, own_text=True) == (60, 100)
    best = RECIPE.replace(quality="best")
    assert tuning_budget(best, small, cuda, own_text=True) == (1400, 8192)
    assert tuning_budget(best.replace(tune_tokens=64), small, cuda, own_text=True) == (1400, 64)
    assert tuning_budget(best, middle, cuda, own_text=True) == (int(8e16 / (10 * 4e9 * 8192)), 8192)
    # More of documents that are drawn anew, where the budget allows it.
    assert tuning_budget(best, small, cuda, own_text=False) == (2800, 8192)
    assert tuning_budget(best.replace(tune_tokens=64), small, cuda, own_text=False) == (2800, 64)
    assert tuning_budget(best, middle, cuda, own_text=False) == (int(8e16 / (10 * 4e9 * 8192)), 8192)
    # Documents alone have no rare tokens, so some are put in where they come again.
    chances = [TuningSettings.of(best, small, cuda, own_text=own).noise for own in (True, False)]
    assert chances == [0.0, NOISE]
    # Codes move by no more than a hundredth of a step each time, unless a rate is asked for.
    assert [tuning_rates(best, steps) for steps in (60, 420, 840, 1400, 2800)] == [
        (0.002, 0.01),
        (0.002, 0.01),
        (0.001, 0.01),
        pytest.approx((0.0006, 0.006)),
        pytest.approx((0.0006 / 2**0.5, 0.006 / 2**0.5)),
    ]
    assert tuning_rates(best.replace(tune_rate=0.05), 600) == (0.05, 0.5)
    steps, tokens = tuning_budget(best, large, cuda, own_text=True)
    # Ten operations for each weight and token, 8e16 in all; steps and tokens keep their proportion.
    assert steps * tokens * 10 * 30e9 == pytest.approx(8e16, rel=0.01)
    assert tokens / steps == pytest.approx(8192 / 120, rel=0.02)
    steps, tokens = tuning_budget(best.replace(tune_tokens=8192), large, cuda, own_text=True)
    assert tokens == 8192
    assert steps * tokens * 10 * 30e9 == pytest.approx(8e16, rel=0.03)
    on_cpu = tuning_budget(best, small, CPU, own_text=True)
    assert on_cpu[0] * on_cpu[1] * 10 * 134e6 == pytest.approx(3e14, rel=0.01)


def test_requested_amounts_of_text_are_kept() -> None:
    work = Work(10**8, 10**8, 10**6, 10**4, 512)
    recipe = RECIPE.replace(samples="auto", max_length=2048)
    assert text_budget(recipe.replace(samples=200), work, CPU, torch.float32) == TextBudget(
        200 * 512, 200, 128, 512, "as asked for"
    )
    assert text_budget(recipe.replace(samples=200, tokens=5000), work, CPU, torch.float32).tokens == 5000
    found = text_budget(recipe.replace(tokens=5000), work, CPU, torch.float32)
    assert (found.tokens, found.documents, found.max_length) == (5000, None, 256)
    # Text that is enough for the method: from the requested documents, and written by the model.
    assert text_budget(recipe.replace(samples=200), work, CPU, torch.float32, most=3000) == TextBudget(
        3000, 200, 128, 512, "enough for gptq"
    )
    most = text_budget(recipe, work, CPU, torch.float32).tokens
    assert text_budget(recipe, work, CPU, torch.float32, most=most).tokens == most
    # At least 4096 tokens; documents of 256 end after three quarters.
    assert text_budget(recipe, work, CPU, torch.float32, most=3000) == TextBudget(
        3000, None, 16, 256, "enough for gptq"
    )


def test_experts_of_as_many_channels_as_a_group_are_one_kind(tmp_path: Path) -> None:
    """Stored, their second product is one group, and gate and up are several."""
    save_mixture(tmp_path / "model", "qwen3-moe", moe_intermediate_size=32)
    recipe = RECIPE.replace(method="rtn", format="compressed-tensors", group_size=32)
    plan = plan_quantize(tmp_path / "model", tmp_path / "out", recipe=recipe, device="cpu")
    quantize(tmp_path / "model", tmp_path / "out", recipe=recipe, device="cpu")
    for verdicts in (plan.servers[1], inspect(tmp_path / "out").servers):
        reasons = {verdict.server: verdict.reason for verdict in verdicts}
        assert "vLLM" in reasons
        assert not any("quantised in another way" in reason for reason in reasons.values()), reasons
