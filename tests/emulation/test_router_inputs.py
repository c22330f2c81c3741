"""The router on the emulation: a shared expert's gate, and an input that the router makes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import KernelFault, apart
from marlinq.kernels.step import Addition, RowNorm, router
from tests.emulation.step import constants, given, poisoned, results, start, strided
from tests.emulation.test_router import route
from tests.kernels.step_problems import BOUND, expected_norm, random, relative_error


def check_gate(
    builder: Builder,
    dtype: torch.dtype = torch.float16,
    *,
    experts: int = 60,
    width: int = 320,
    clusters: bool = True,
    planted: Planted | None = None,
) -> None:
    """A shared expert's gate beside a choice that it does not change."""
    torch.manual_seed(8)
    x = apart((2 * torch.randn(3, width + 8)).round().clamp(-3, 3).to(dtype)[:, :width])
    weight, gate = (
        apart((2 * torch.randn(*shape)).round().clamp(-3, 3).div(64).to(dtype))
        for shape in ((experts, width), (width,))
    )
    gates = poisoned(3, 1, dtype=torch.float32)
    ids, weights = route(
        *(builder, x, weight, 4, "softmax"),
        normalised=True,
        gate=gate,
        gates=gates,
        clusters=clusters,
        planted=planted,
    )
    # Eighths, of which sums are exact; then one exponential of 2 ulp.
    logits = (x.double() @ gate.double()).to(dtype).double()
    assert relative_error(gates, logits.sigmoid()[:, None]) < 1e-6
    alone = route(builder, x, weight, 4, "softmax", normalised=True, clusters=clusters)
    assert torch.equal(ids, alone[0])
    assert torch.equal(weights, alone[1])


# The gate's warp has experts too, or is a warp of its own, whose logit has four neighbours or none.
@pytest.mark.parametrize(
    ("experts", "width", "clusters"),
    [(60, 320, True), (60, 320, False), (64, 4160, False), (130, 264, True), (8, 64, True)],
)
def test_a_shared_experts_gate(builder: Builder, experts: int, width: int, clusters: bool) -> None:
    dtype = torch.bfloat16 if experts == 64 else torch.float16
    check_gate(builder, dtype, experts=experts, width=width, clusters=clusters)


def check_shared(
    builder: Builder, *, gated: bool, experts: int = 60, shared: int = 2, planted: Planted | None = None
) -> None:
    """Experts that every row takes behind those that it chooses."""
    torch.manual_seed(9)
    x = apart((2 * torch.randn(3, 328)).round().clamp(-3, 3).half()[:, :320])
    weight, gate = (
        apart((2 * torch.randn(*shape)).round().clamp(-3, 3).div(64).half())
        for shape in ((experts, 320), (320,))
    )
    taken = 4 + shared
    ids, weights = (
        apart(torch.full((3, taken), -1, dtype=torch.int32)),
        poisoned(3, taken, dtype=torch.float32),
    )
    prepared = router(
        *(x, weight, ids, weights),
        scoring="softmax",
        normalised=True,
        scale=2.0,
        gate=gate if gated else None,
        shared=shared,
    )
    memory = [
        *given(x=x),
        *constants(weight=weight, gate=gate if gated else None),
        *results(ids=ids, weights=weights),
    ]
    start(builder, prepared, memory, capability=90, planted=planted)
    alone = route(builder, x, weight, 4, "softmax", normalised=True, scale=2.0)
    assert torch.equal(ids[:, :4], alone[0])
    assert torch.equal(weights[:, :4], alone[1])
    assert ids[:, 4:].tolist() == 3 * [list(range(experts, experts + shared))]
    factor = (x.double() @ gate.double()).half().double().sigmoid() if gated else torch.ones(3)
    assert relative_error(weights[:, 4:], factor[:, None].expand(-1, shared)) < 1e-6


@pytest.mark.parametrize("gated", [False, True])
def test_a_shared_expert_is_taken_by_every_row(builder: Builder, gated: bool) -> None:
    check_shared(builder, gated=gated, shared=1 if gated else 2)


def test_a_fault_of_a_shared_experts_number_is_reported(builder: Builder) -> None:
    with pytest.raises(AssertionError):
        check_shared(builder, gated=False, planted=SHARED_FAULT)


SHARED_FAULT = Planted("shared_number", "experts")
GATE_FAULTS = {
    "another row of the weight for the gate": Planted("gate_weights", "weight + (i64)expert * vectors"),
    "the gate's logit not read": Planted("logits_read", "experts"),
    "a logit in the place of the gate": Planted("gate_value", "gates[m] = logits[experts];"),
    "the gate not multiplied": Planted("products_multiplied", "experts"),
    "the first row's gate for all": Planted("gate_value", "gates[0] = 1.f / (1.f + expf(-logits[experts]));"),
}


@pytest.mark.parametrize("name", GATE_FAULTS)
def test_a_fault_of_gates_is_reported(builder: Builder, name: str) -> None:
    with pytest.raises((AssertionError, KernelFault)):
        check_gate(builder, planted=GATE_FAULTS[name])


@pytest.mark.parametrize(
    "wrong",
    [
        {"gate": None},
        {"gates": None},
        {"shared": 1, "ids": torch.zeros(2, 3, dtype=torch.int32), "weights": torch.zeros(2, 3)},
        {"gate": torch.zeros(72, dtype=torch.float16)},
        {"gate": torch.zeros(64)},
        {"gates": torch.zeros(2)},
        {"gates": torch.zeros(2, 1, dtype=torch.float16)},
    ],
)
def test_gates_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    x, weight = torch.zeros(2, 64, dtype=torch.float16), torch.zeros(4, 64, dtype=torch.float16)
    given: dict[str, Any] = {
        "ids": torch.zeros(2, 2, dtype=torch.int32),
        "weights": torch.zeros(2, 2),
        "gate": torch.zeros(64, dtype=torch.float16),
        "gates": torch.zeros(2, 1),
    }
    with pytest.raises(ValueError, match="gate"):
        router(x, weight, scoring="softmax", normalised=True, **{**given, **wrong})


def check_addition(
    builder: Builder,
    kind: Any = "RMS",
    dtype: torch.dtype = torch.float16,
    *,
    width: int = 320,
    clusters: bool = True,
    planted: Planted | None = None,
) -> None:
    """A router that makes its own input; what it chooses is what it would choose of the rows that it made."""
    torch.manual_seed(4)
    m, top, experts = 3, 8, 128
    source, first = strided(m, width, width + 8, dtype), strided(m, width, width + 16, dtype)
    stored = poisoned(m, width + 8, dtype=dtype)[:, :width]
    x = poisoned(m, width + 24, dtype=dtype)[:, :width]
    norm_weight, bias = apart(random(width, dtype=dtype)), apart(random(width, dtype=dtype))
    norm = RowNorm(kind, norm_weight, bias if kind == "LAYER" else None, 1e-6, 0.25)
    weight = apart(random(experts, width, dtype=dtype))
    ids, weights = apart(torch.full((m, top), -1, dtype=torch.int32)), poisoned(m, top, dtype=torch.float32)
    prepared = router(
        *(x, weight, ids, weights),
        scoring="softmax",
        normalised=True,
        clusters=clusters,
        addition=Addition(source, first, stored, norm, 0.5),
    )
    memory = [
        *given(source=source, first=first),
        *constants(weight=weight, norm_weight=norm_weight, norm_bias=norm.bias),
        *results(stored=stored, x=x, ids=ids, weights=weights),
    ]
    start(builder, prepared, memory, capability=90 if clusters else 80, planted=planted)
    assert relative_error(stored, source.double() + 0.5 * first.double()) < BOUND[dtype]
    assert relative_error(x, expected_norm(stored.double(), norm)) < BOUND[dtype]
    alone = route(builder, apart(x.clone()), weight, top, "softmax", normalised=True, clusters=clusters)
    assert torch.equal(ids, alone[0])
    assert torch.equal(weights, alone[1])


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize(("kind", "width"), [("RMS", 320), ("RMS_WIDE", 4160), ("LAYER", 64)])
def test_a_router_makes_its_own_input(builder: Builder, kind: str, width: int, clusters: bool) -> None:
    dtype = torch.bfloat16 if kind == "LAYER" else torch.float16
    check_addition(builder, kind, dtype, width=width, clusters=clusters)


ADDITION_FAULTS = {
    "an addend without its factor": Planted("addend_factor", "addend[j]"),
    "an input that is not stored": Planted("made_row_stored"),
    "an input read before it is there": Planted("made_row_there"),
    "no wait for the previous kernel": Planted("router_waits"),
}


@pytest.mark.parametrize("name", ADDITION_FAULTS)
def test_a_fault_of_additions_is_reported(builder: Builder, name: str) -> None:
    with pytest.raises((AssertionError, KernelFault)):
        check_addition(builder, planted=ADDITION_FAULTS[name])
