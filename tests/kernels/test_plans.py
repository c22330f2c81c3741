"""Plans are found by their tensors, checked against them, and gone with them."""

from __future__ import annotations

import gc
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from marlinq.core.granularity import Granularity
from marlinq.kernels import batch_invariant, dependent_launches, forced_kernel
from marlinq.kernels.contract.demands import Demands, demands
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.launch import plans
from marlinq.kernels.ops import gemm
from marlinq.kernels.ops.operators import OPERATORS, w4a16_gemm
from tests.kernels.problems import random_operands

K, N = 128, 192
DEQUANTIZED = 1000  # the rows of a batch for which the decision is to dequantise


class _Call:
    """Counts its launches."""

    def __init__(self, rows: int, behind_own: bool) -> None:
        self.rows = rows
        self.behind_own = behind_own
        self.demands = demands()
        self.started: list[tuple[int, int]] = []

    def start(self, x: int, out: int) -> None:
        self.started.append((x, out))


class _Devices:
    """Which device is current; tensors on the CPU take the place of those on the first."""

    def __init__(self) -> None:
        self.current = -1
        self.entered: list[int] = []

    def device(self, index: int) -> _Devices:
        self.entered.append(index)
        return self

    def __enter__(self) -> None:
        self.before, self.current = self.current, self.entered[-1]

    def __exit__(self, *_: object) -> None:
        self.current = self.before


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> _Devices:
    devices = _Devices()
    # Builds of torch without CUDA lack it.
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: devices.current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", devices.device)
    return devices


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch, devices: _Devices) -> list[_Call]:
    calls: list[_Call] = []

    def prepare(operands: ProductTensors, behind_own: bool) -> _Call:
        assert (operands.weight.granularity, operands.weight.format) == (Granularity.group(64), INT4)
        assert operands.x.shape[1] == K
        assert devices.current == -1
        calls.append(_Call(operands.x.shape[0], behind_own))
        return calls[-1]

    def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert devices.current == -1
        return torch._C._dynamo.guards._empty_strided_cpu(shape, strides, dtype)  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(plans, "prepare", prepare)
    monkeypatch.setattr(plans, "dequantizes", lambda problem, _: problem.m == DEQUANTIZED)
    monkeypatch.setattr(plans, "empty_strided", empty_strided)
    return calls


@pytest.fixture
def given() -> plans.Weight:
    operands = random_operands(K, N, 64, torch.float16, device="cpu")
    return operands.words, operands.scales, None, None, None


@pytest.fixture
def plan(given: plans.Weight) -> plans.Plan:
    return plans.Plan(given, Granularity.group(64), N, INT4, lambda _: None)


def test_a_plan_serves_every_shape_that_fits(
    prepared: list[_Call], given: plans.Weight, plan: plans.Plan
) -> None:
    for shape in ((5, K), (1, 5, K), (K,), (0, K), (5, K)):
        x = torch.zeros(shape).half()
        out = plan.run(x, *given)
        assert out is not None
        assert out.shape == (*shape[:-1], N)
        assert out.dtype == torch.float16
        assert out.is_contiguous()
        if x.numel():
            call = next(call for call in prepared if (x.data_ptr(), out.data_ptr()) in call.started)
            assert call.rows == x.numel() // K
    assert [call.rows for call in prepared] == [5, 5, 1]
    assert [len(call.started) for call in prepared] == [2, 1, 1]


def test_operands_that_do_not_fit_a_plan_are_checked_again(
    prepared: list[_Call], devices: _Devices, given: plans.Weight, plan: plans.Plan
) -> None:
    wide = torch.zeros(4, 2 * K).half()
    for x in (wide[:, :K], wide[:2], wide.flatten()[1 : 2 * K + 1].view(2, K)):
        assert plan.run(x, *given) is None
    moved = given[1].clone()
    assert plan.run(wide[:1, :K], given[0], moved, None, None, None) is None
    elsewhere = plans.Plan(given, Granularity.group(64), N, INT4, lambda _: None)
    elsewhere._index = devices.current = 0
    assert elsewhere.run(wide[:1, :K], *given) is None
    assert not prepared


def test_nothing_is_prepared_where_a_weight_is_dequantised(
    prepared: list[_Call], given: plans.Weight, plan: plans.Plan
) -> None:
    for rows in (DEQUANTIZED, 3, DEQUANTIZED):
        assert (plan.run(torch.zeros(rows, K).half(), *given) is None) == (rows == DEQUANTIZED)
    assert [call.rows for call in prepared] == [3]


@pytest.mark.parametrize("place", range(5))
def test_changed_storage_is_noticed(
    prepared: list[_Call], monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(plans, "Gathered", lambda *given: given[-1])
    monkeypatch.setattr(plans, "gathering", lambda x, order: None)
    operands = random_operands(K, N, 64, torch.float16, device="cpu", zeros=True, bias=True)
    order = torch.arange(K, dtype=torch.int32)
    given = operands.words, operands.scales, operands.zeros, operands.bias, order
    plan = plans.Plan(given, Granularity.group(64), N, INT4, lambda _: None)
    x = torch.zeros(1, K).half()
    assert plan.run(x, *given) is not None
    changed = given[place]
    assert changed is not None
    before = changed.data
    changed.data = changed.clone()
    assert plan.run(x, *given) is None
    changed.data = before
    assert plan.run(x, *given) is not None


def test_calls_belong_to_the_demands_they_were_prepared_under(
    prepared: list[_Call], given: plans.Weight, plan: plans.Plan
) -> None:
    x = torch.zeros(1, K).half()
    for _ in range(2):
        plan.run(x, *given)
        with batch_invariant():
            plan.run(x, *given)
        with forced_kernel("stream"):
            plan.run(x, *given)
            with dependent_launches():
                plan.run(x, *given)
    assert [call.demands for call in prepared] == [
        Demands(),
        Demands(batch_invariant=True),
        Demands("stream"),
        Demands("stream", dependent=True),
    ]
    assert [len(call.started) for call in prepared] == [2, 2, 2, 2]


def test_the_weights_device_becomes_the_current_one(
    prepared: list[_Call], devices: _Devices, given: plans.Weight, plan: plans.Plan
) -> None:
    x = torch.zeros(1, K).half()
    devices.current = 1
    assert plan.run(x, *given) is not None
    assert devices.entered == [-1]
    assert devices.current == 1
    devices.current = -1
    assert plan.run(x, *given) is not None
    assert devices.entered == [-1]


def test_shapes_are_forgotten_before_they_are_too_many(
    prepared: list[_Call], given: plans.Weight, plan: plans.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_MAX_CALLS", 3)
    for rows in (1, 2, 3, 1, 4, 1):
        plan.run(torch.zeros(rows, K).half(), *given)
    assert [call.rows for call in prepared] == [1, 2, 3, 4, 1]


def test_a_plan_goes_with_its_tensors() -> None:
    operands = random_operands(K, N, 64, torch.float16, device="cpu", zeros=True, bias=True)
    given = operands.words, operands.scales, operands.zeros, operands.bias, None
    key = ("a key",)
    plans.remember(key, given, Granularity.group(64), N, INT4)
    assert plans.find(key) is not None
    operands.zeros = None
    del given
    gc.collect()
    assert plans.find(key) is None


def test_a_plan_is_made_anew_only_when_its_weight_has_moved(given: plans.Weight) -> None:
    key = ("another key",)
    plans.remember(key, given, Granularity.group(64), N, INT4)
    first = plans.find(key)
    plans.remember(key, given, Granularity.group(64), N, INT4)
    assert plans.find(key) is first
    given[1].data = given[1].clone()
    plans.remember(key, given, Granularity.group(64), N, INT4)
    assert plans.find(key) is not first


def test_ordered_activations_are_gathered_first(
    prepared: list[_Call], given: plans.Weight, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = torch.arange(K, dtype=torch.int32)
    gathered: list[tuple[object, ...]] = []
    monkeypatch.setattr(plans, "Gathered", lambda *given: gathered.append(given[1:-1]) or given[-1])
    monkeypatch.setattr(plans, "gathering", lambda x, order: gathered.append((x.shape, x.stride(), order)))
    ordered = *given[:4], order
    plan = plans.Plan(ordered, Granularity.group(64), N, INT4, lambda _: None)
    x = torch.zeros(2, 3, 100).half()
    for _ in range(2):
        out = plan.run(x, *ordered)
        assert out is not None
        assert out.shape == (2, 3, N)
    # Prepared once: six rows of any length become K columns.
    (shape, strides, given_order), rest = gathered
    assert (shape, strides, given_order is order) == ((6, 100), (100, 1), True)
    assert rest == (order.data_ptr(), 6, K, torch.float16)
    assert [(call.rows, call.behind_own, len(call.started)) for call in prepared] == [(6, True, 2)]


@pytest.mark.parametrize("columns", [N, 150])
def test_the_operator_finds_its_plans(
    prepared: list[_Call], given: plans.Weight, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    launched: list[int] = []
    monkeypatch.setattr(gemm, "launch_gemm", lambda operands, **_: launched.append(operands.x.shape[0]))
    x = torch.zeros(3, 2 * K).half()
    contiguous = x[:, :K].contiguous()
    for value in (contiguous, contiguous, x[:, :K], contiguous):
        found = OPERATORS[INT4.name].cuda(value, *given[:4], 64, columns)
        assert found.shape == (3, columns)
        assert found.stride() == (N, 1)
    # The first call is checked, and so is the strided one, which keeps the plan.
    assert launched == [3, 3]
    assert [len(call.started) for call in prepared] == [2]
    other = torch.zeros(3, K).bfloat16()
    with pytest.raises(ValueError, match="scales: expected torch.bfloat16"):
        OPERATORS[INT4.name].cuda(other, *given[:4], 64, columns)


def test_the_dispatcher_is_passed_only_where_nothing_works_through_it(
    prepared: list[_Call], given: plans.Weight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "launch_gemm", lambda *_, **__: None)
    x = torch.ones(3, K).half()
    with torch.no_grad():
        # Without a plan it is the operator that runs, here its reference; so it is for another weight.
        expected = w4a16_gemm(x, *given[:4], 64, N)
        OPERATORS[INT4.name].cuda(x, *given[:4], 64, N)
        for _ in range(2):
            w4a16_gemm(x, *given[:4], 64, N)
        assert torch.equal(w4a16_gemm(x, given[0], given[1].clone(), None, None, 64, N), expected)
    (call,) = prepared
    assert len(call.started) == 2

    def inside(watched: AbstractContextManager[object]) -> Tensor:
        with watched:
            return w4a16_gemm(x, *given[:4], 64, N)

    assert torch.equal(inside(torch.enable_grad()), expected)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert torch.equal(inside(nullcontext()), expected)
    assert any(event.key == "marlinq::w4a16_gemm" for event in profiler.key_averages())
    with torch.no_grad():
        assert torch.equal(inside(torch.device("cpu")), expected)
        w4a16_gemm(x.as_subclass(_Subclass), *given[:4], 64, N)
        counted = _Counted()
        assert torch.equal(inside(counted), expected)
        assert counted.names == ["marlinq::w4a16_gemm"]
        mapped = torch.vmap(lambda row: row + inside(nullcontext()).sum())(torch.zeros(2))
        assert mapped.shape == (2,)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of tracing
            traced = torch.jit.trace(lambda x: w4a16_gemm(x, *given[:4], 64, N), x, check_trace=False)
        assert "marlinq::w4a16_gemm" in str(traced.graph)
        compiled = torch.compile(lambda x: w4a16_gemm(x, *given[:4], 64, N), fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), expected)
    assert len(call.started) == 2
    with torch.inference_mode():
        assert inside(nullcontext()).is_inference()
    assert len(call.started) == 3


class _Subclass(Tensor):
    """Any."""


class _Counted(TorchDispatchMode):
    """Keeps the names of the operators that are dispatched inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition(".")[0])
        return func(*args, **kwargs or {})
