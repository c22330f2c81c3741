"""Torch's packed INT4 product for CPUs: what it computes, what it refuses, when it is taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.weight import QuantizedWeight
from marlinq.operations.evaluate import evaluate
from marlinq.operations.verify import verify
from marlinq.runtime import OPERATORS, Setting, decide, load
from marlinq.runtime.operators import cpu_timing, int4pack
from marlinq.runtime.operators.int4pack import Int4PackLinear, product_group_size
from tests.runtime.test_generation import wide_model
from tests.runtime.test_loading import logits, relative
from tests.testing.runnable_folders import (
    random_quantizer,
    random_tuple,
    save_quantized,
    save_tokenizer,
    stored_weight,
)

CPU = torch.device("cpu")
ROUNDED = Setting(CPU, torch.float32, exact=False)
EXACT = Setting(CPU, torch.float32)
BFLOAT16 = Setting(CPU, torch.bfloat16)
BF16_ROUNDOFF = 2**-8


def multiplied_weight(module: Int4PackLinear, q: QuantizedWeight) -> Tensor:
    """The weight of torch's product, float64 [N, K], from the buffers and the codes."""
    order = torch.arange(q.in_features) if module.order is None else module.order
    groups = torch.arange(q.in_features) // module.group_size
    scales, offsets = module.scales_and_offsets.double().unbind(-1)
    sorted_weight = (q.codes[order].double() - 8) * scales[groups] + offsets[groups]
    weight = torch.empty_like(sorted_weight)
    weight[order] = sorted_weight
    return weight.t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("k", "n", "group_size", "act_order"),
    [
        (64, 16, 32, False),
        (576, 192, 64, False),
        (576, 48, 192, True),  # groups of 192 in three of 64
        (384, 80, 128, False),
        (512, 64, 256, True),
        (1024, 32, 512, False),
        (1536, 576, -1, False),  # one scale a channel, repeated for groups of 256
        (96, 1040, -1, False),
    ],
)
def test_the_product_against_float64(
    k: int, n: int, group_size: int, act_order: bool, symmetric: bool, dtype: torch.dtype
) -> None:
    q = random_tuple(k, n, group_size=group_size, symmetric=symmetric, act_order=act_order)
    setting = replace(ROUNDED, dtype=dtype)
    stored = stored_weight(q, "gptq-v2")
    assert OPERATORS["int4pack"].refusal(stored, setting) is None
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(n, generator=generator)
    module = OPERATORS["int4pack"].build(stored, bias, setting)
    assert isinstance(module, Int4PackLinear)
    weight = multiplied_weight(module, q)
    for rows in (1, 3, 33):
        x = torch.randn(1, rows, k, generator=generator).to(dtype)
        operand = x.to(torch.bfloat16).double()
        product = operand @ weight.t()
        # The result is rounded to BF16, and so is the sum with the bias where the model runs in BF16. A
        # float32 sum of K terms, each of a weight that was itself rounded twice, adds K + 2 roundings of
        # 2**-24; a weight's two parts, code and offset, are at most 8 scales larger than the weight.
        terms = operand.abs() @ (weight.abs() + 8 * module.scales_and_offsets[..., 0].abs().max()).t()
        tolerance = BF16_ROUNDOFF * product.abs() + (k + 2) * 2**-24 * terms
        expected = product + bias.to(dtype).double()
        if dtype == torch.bfloat16:
            tolerance = tolerance + BF16_ROUNDOFF * (expected.abs() + tolerance)
        else:
            tolerance = tolerance + 2**-24 * expected.abs()
        found = module(x)
        assert (found.shape, found.dtype) == ((1, rows, n), dtype)
        assert bool(((found.double() - expected).abs() <= tolerance).all())


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weights_are_off_by_what_the_docs_say(symmetric: bool, scale_dtype: torch.dtype) -> None:
    q = random_tuple(256, 64, group_size=64, symmetric=symmetric, scale_dtype=scale_dtype)
    # Every code stands beside every zero point somewhere.
    q = replace(q, codes=torch.arange(256).remainder(16).to(torch.uint8)[:, None].expand(-1, 64).contiguous())
    if not symmetric:
        q = replace(q, zeros=torch.arange(256).remainder(16).reshape(4, 64).to(torch.uint8))
    groups = q.g_idx.long()
    steps = q.scales.double()[groups].abs()
    distance = (q.codes.double() - q.zeros.double()[groups]).abs()
    exact = (q.codes.double() - q.zeros.double()[groups]) * q.scales.double()[groups]
    found = multiplied_weight(Int4PackLinear(q), q).t()
    error = (found - exact).abs()
    if symmetric and scale_dtype == torch.bfloat16:
        assert not bool(error.any())
        return
    # The scale's rounding, and the offset's: 7 of the rounded scales at most.
    scale_error = 0 if scale_dtype == torch.bfloat16 else BF16_ROUNDOFF * distance
    offset_error = 0 if symmetric else BF16_ROUNDOFF * 7 * (1 + BF16_ROUNDOFF)
    assert bool((error <= (scale_error + offset_error) * steps).all())
    assert bool((error < steps / 11).all())
    assert bool(error.any())


def test_groups_are_split_into_those_of_the_product() -> None:
    shared = map(Granularity.from_group_size, (32, 96, 128, 192, 768, -1))
    assert [product_group_size(each, 1536) for each in shared] == [
        32,
        32,
        128,
        64,
        256,
        256,
    ]
    assert product_group_size(Granularity.group(128), 576) == 64  # its last group is short
    assert product_group_size(Granularity.channel(), 576) == 64
    assert product_group_size(Granularity.group(16), 64) is None
    assert product_group_size(Granularity.channel(), 80) is None


@pytest.mark.parametrize(
    ("options", "setting", "reason"),
    [
        ({"bits": 8}, ROUNDED, "int8 weights"),
        ({"group_size": 16}, ROUNDED, "no group of 32, 64, 128 or 256 divides groups of 16"),
        ({"k": 80, "group_size": -1}, ROUNDED, "no group .* divides one scale per channel in 80 channels"),
        ({"n": 40}, ROUNDED, "40 output channels are no multiple of 16"),
        ({}, EXACT, "it multiplies in bfloat16, exact float32 products"),
        ({}, Setting(CPU, torch.float16, exact=False), "the model runs in float16"),
        ({}, Setting(torch.device("cuda:0"), torch.bfloat16), "does not run on cuda"),
    ],
)
def test_refusals_name_the_reason(options: dict[str, int], setting: Setting, reason: str) -> None:
    q = random_tuple(**{"k": 64, "n": 64, "group_size": 32, **options})
    refusal = OPERATORS["int4pack"].refusal(stored_weight(q), setting)
    assert refusal is not None
    assert re.search(reason, refusal)


def test_channels_in_no_order_are_refused() -> None:
    q = random_tuple(64, 32, group_size=32, act_order=True)
    uneven = q.g_idx.clone()
    uneven[uneven.argmax()] = 0
    stored = stored_weight(replace(q, g_idx=uneven))
    assert "sorting g_idx does not give groups of 32" in str(OPERATORS["int4pack"].refusal(stored, ROUNDED))


def test_an_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4pack, "_OPERATIONS", ("_no_such_product",))
    refusal = OPERATORS["int4pack"].refusal(stored_weight(random_tuple(64, 64, group_size=32)), ROUNDED)
    assert refusal == f"torch {torch.__version__} has no packed INT4 product for CPUs"


def test_a_scale_that_overflows_is_an_error() -> None:
    q = random_tuple(64, 32, group_size=32, scale_dtype=torch.float32)
    # Halfway between the largest BF16 value and the next power of two, and so rounded to infinity.
    stored = stored_weight(replace(q, scales=torch.full_like(q.scales, 3.4e38)), "compressed-tensors")
    with pytest.raises(UnsupportedError, match="compressed-tensors: a scale overflows bfloat16; .*float32"):
        OPERATORS["int4pack"].build(stored, None, ROUNDED)


def fake_times(
    monkeypatch: pytest.MonkeyPatch, packed: float, dense: float, threads: int | None = None
) -> list[tuple[object, ...]]:
    """Makes every measurement find these seconds; the problems that were measured."""
    asked: list[tuple[object, ...]] = []

    def measure(*problem: object) -> int4pack.Measured:
        asked.append(problem)
        return int4pack.Measured(packed, dense, threads)

    monkeypatch.setattr(int4pack, "measure", measure)
    return asked


def test_the_measured_times_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_weight(random_tuple(192, 64, group_size=192))
    asked = fake_times(monkeypatch, 20e-6, 100e-6)
    found = decide(stored, ROUNDED)
    assert (found.operator, found.chosen.seconds) == ("int4pack", 20e-6)
    assert found.reason.startswith(
        "torch's packed INT4 product, rounded to bfloat16: 20 us for 192 x 64 measured, 100 us dequantised; "
        "not dense: torch's product with the dequantised weight"
    )
    # Rows, K, N, the group of the product, dtype, threads.
    assert asked == [(1, 192, 64, 64, torch.float32, torch.get_num_threads())]
    assert decide(stored, EXACT).operator == "dense"
    assert "exact float32 products were asked for" in decide(stored, EXACT).reason


@pytest.mark.parametrize(("packed", "chosen"), [(99e-6, "int4pack"), (101e-6, "dense"), (300e-6, "dense")])
def test_int4pack_is_chosen_where_it_gains_a_fifth(
    packed: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, packed, 120e-6)
    stored = stored_weight(random_tuple(64, 64, group_size=32))
    found = decide(stored, ROUNDED)
    assert found.operator == chosen
    if chosen == "dense":
        times = f"{packed * 1e6:.0f} us for 64 x 64 measured, 120 us dequantised"
        assert f"not int4pack: not 1.2 times faster: {times}" in found.reason
    assert decide(stored, ROUNDED, operator="int4pack").operator == "int4pack"


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (4, 1), (5, None)])
def test_few_rows_take_the_threads_that_are_fastest(
    rows: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, 20e-6, 100e-6, threads=1)
    stored = stored_weight(random_tuple(64, 64, group_size=32))
    assert "20 us for 64 x 64 measured on one thread" in decide(stored, ROUNDED).reason
    module = OPERATORS["int4pack"].build(stored, None, ROUNDED)
    before = torch.get_num_threads()
    seen: list[int] = []
    product = int4pack._product

    def counting(*operands: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return product(*operands)

    monkeypatch.setattr(int4pack, "_product", counting)
    torch.set_num_threads(3)
    try:
        alone = module(torch.ones(rows, 64))
        assert torch.get_num_threads() == 3
        module.threads = None
        assert torch.equal(alone, module(torch.ones(rows, 64)))
    finally:
        torch.set_num_threads(before)
    assert seen == [expected or 3, 3]


def test_int4pack_is_named_on_other_devices_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_weight(random_tuple(64, 64, group_size=32))
    elsewhere = Setting(torch.device("mps"), torch.bfloat16)
    assert "int4pack" not in decide(stored, elsewhere).reason
    asked = decide(stored, elsewhere, operator="int4pack")
    assert (asked.operator, "does not run on mps" in asked.reason) == ("dense", True)


def test_a_shape_is_measured_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def alternated(*candidates: list[Callable[[], Tensor]]) -> tuple[float, ...]:
        timed.append(len(candidates))
        for products in candidates:
            assert products[0]().shape == (1, 64)
        return (1.0, 2.0, 5.0)[-len(candidates) :] if len(candidates) == 2 else times

    times = (1.0, 1.3, 5.0)
    monkeypatch.setattr(int4pack, "seconds_in_turn", alternated)
    int4pack.measure.cache_clear()
    try:
        for threads in (1, 1, 2):
            expected = (2.0, 5.0, None) if threads == 1 else (1.0, 5.0, None)
            assert int4pack.measure(1, 96, 64, 32, torch.float32, threads) == expected
        assert timed == [2, 3]
        # All threads have to gain a fifth.
        int4pack.measure.cache_clear()
        times = (1.0, 1.1, 5.0)
        assert int4pack.measure(1, 96, 64, 32, torch.float32, 2) == (1.1, 5.0, 1)
    finally:
        int4pack.measure.cache_clear()


class Clock:
    """Stands still but for what products take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 0.0, ""
        monkeypatch.setattr(cpu_timing.time, "perf_counter", lambda: self.now)

    def product(self, name: str, *seconds: float) -> Callable[[], None]:
        """Takes ``seconds`` one after the other, again and again."""
        turns = cycle(seconds)

        def run() -> None:
            self.ran += name
            self.now += next(turns)

        return run


def test_candidates_take_turns_and_stalls_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    # Three of four products wait for a thread that another process has displaced: 45 turns in 0.3 s.
    fast = [clock.product(name, 9e-3, 9e-3, 1e-5, 9e-3) for name in "ab"]
    slow = [clock.product("c", 2e-5)]
    assert cpu_timing.seconds_in_turn(fast, slow) == pytest.approx((1e-5, 2e-5))
    assert clock.ran.startswith("ac" + "acbc" * 4)
    assert 0.3 < clock.now < 0.32


def test_quick_products_take_many_turns_and_slow_ones_few(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    cpu_timing.seconds_in_turn([clock.product("a", 1e-5)], [clock.product("b", 1e-4)])
    assert len(clock.ran) == 2 * (1 + 96)
    clock.ran = ""
    cpu_timing.seconds_in_turn([clock.product("a", 0.1)], [clock.product("b", 1.0)])
    assert len(clock.ran) == 2 * (1 + 16)


def test_copies_are_larger_than_a_cache() -> None:
    weight = torch.zeros(1 << 20, dtype=torch.uint8)
    copies = cpu_timing.cold_copies(weight)
    assert len(copies) == 64
    assert len({copy.data_ptr() for copy in copies}) == 64
    assert len(cpu_timing.cold_copies(weight[:64])) == 96


def test_a_model_runs_with_it_unless_exactness_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_times(monkeypatch, 1e-6, 1e-3)
    reference = wide_model()
    save_quantized(tmp_path, reference, "gptq", random_quantizer(symmetric=False))
    save_tokenizer(tmp_path)

    def operators(**options: object) -> set[str]:
        loaded = load(tmp_path, device="cpu", **options)
        return {decision.operator for decision in loaded.decisions.values()}

    loaded = load(tmp_path, device="cpu")
    assert loaded.dtype == torch.float32
    assert "int4pack: torch's packed INT4 product, rounded to bfloat16" in "\n".join(loaded.report())
    # Each of the seven products of a block rounds its operands and its result to BF16.
    assert 0 < relative(logits(loaded.model), logits(reference)) < 7 * BF16_ROUNDOFF
    assert operators() == {"int4pack"}
    assert operators(dtype="bfloat16") == {"int4pack"}
    assert operators(dtype="float32") == operators(exact=True) == {"dense"}
    assert operators(dtype="float32", exact=False) == {"int4pack"}
    text = tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 8, encoding="utf-8")
    found = evaluate(tmp_path, text=str(text), windows=1, length=64, device="cpu")
    assert "quantised linears: dense: " in "\n".join(found.notes)


def test_verify_runs_both_models_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, 1e-6, 1e-3)
    for name, layout in (("one", "gptq"), ("other", "awq")):
        save_quantized(tmp_path / name, wide_model(), layout, random_quantizer())
        save_tokenizer(tmp_path / name)
    report = verify(tmp_path / "one", against=tmp_path / "other", logits=True, device="cpu")
    assert report.ok, report.render()
