"""Routed layers on a GPU: random layers, batches and variants against float64, graphs, and the same bits.

``MARLINQ_FUZZ_SEED`` repeats a run, ``MARLINQ_FUZZ_PROBLEMS`` sets its length.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import E2M1, E4M3, INT4, INT8
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.experts import ACTIVATIONS, ExpertWeights, reference_experts, routed_experts
from marlinq.kernels.experts.configurations import ExpertsDecision, ExpertsShape
from marlinq.kernels.experts.experts_decision import decide_experts, decisions
from marlinq.kernels.experts.launch import launch_experts
from marlinq.kernels.experts.steps import instantiations
from marlinq.operations.bench.timing import capture
from tests.kernels.experts_problems import Layer, Shape, random_layer, random_routing
from tests.kernels.problems import BOUND, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
DEVICE = "cuda"


@dataclass(frozen=True)
class Call:
    """One layer and batch; ``number`` chooses among the variants, None the decision's own."""

    shape: Shape
    m: int
    activation: str
    skew: float
    elsewhere: bool
    wide: bool
    number: int | None
    seed: int

    def layer(self) -> ExpertsShape:
        shape = self.shape
        bfloat16 = shape.dtype == torch.bfloat16
        return ExpertsShape(
            *(self.m, shape.top, shape.experts, shape.hidden, shape.inner),
            Granularity.from_group_size(shape.group_size),
            shape.zeros,
            bfloat16,
            shape.format,
            shape.biased,
        )

    def decision(self) -> ExpertsDecision:
        device = device_numbers(0)
        if self.number is None:
            return decide_experts(self.layer(), device)
        listed = decisions(self.layer(), device)
        return listed[self.number % len(listed)]


_LAYERS = 25  # problems a layer


def draw_shape(rng: random.Random) -> Shape:
    experts = rng.choice((3, 8, 33, 128, 257))
    hidden, inner = 64 * rng.choice((1, 2, 5, 12, 24)), 64 * rng.choice((1, 3, 4, 12))
    weight_format = rng.choice((INT4, INT4, INT8, E4M3, E2M1))
    sizes = [g for g in (16, 32, 64, 128, -1) if g < 0 or g >= weight_format.smallest_group]
    group = rng.choice([g for g in sizes if g < 0 or not (hidden % g or inner % g)])
    top = min(rng.choice((1, 2, 6, 8)), experts)
    dtype = rng.choice((torch.float16, torch.bfloat16))
    zeros = weight_format.stores_zeros and rng.random() < 0.5
    return Shape(experts, top, hidden, inner, group, zeros, dtype, rng.random() < 0.3, weight_format)


def draw(rng: random.Random, shape: Shape, activation: str, wide: bool) -> Call:
    """Any batch; often few rows, whose variants are the most."""
    few = rng.random() < 0.5
    return Call(
        shape,
        rng.randint(1, 40) if few else rng.choice((31, 64, 100, 129, 200, 513, 1030, 3000)),
        activation,
        rng.choice((0.0, 0.0, 0.05, 2.0)),
        rng.random() < 0.3,
        wide,
        # The two ways without sorting, or the fastest with it, more often than others.
        rng.choice((None, rng.randrange(4), rng.randrange(4), rng.randrange(100))),
        rng.getrandbits(31),
    )


def draw_calls(rng: random.Random, count: int) -> list[Call]:
    """Layers one after the other, as ``_LAYERS`` calls each: kernels and experts are shared by them."""
    calls: list[Call] = []
    while len(calls) < count:
        layer = draw_shape(rng), rng.choice(("silu", "silu", *ACTIVATIONS)), rng.random() < 0.3
        calls += [draw(rng, *layer) for _ in range(_LAYERS)]
    return calls[:count]


def operands(call: Call, layer: Layer) -> tuple[Tensor, Tensor, Tensor, ExpertWeights, Tensor | None]:
    torch.manual_seed(call.seed)
    known = call.shape.experts * (2 if call.elsewhere else 1)
    x, ids, weights = random_routing(replace(call.shape, experts=known), call.m, DEVICE, call.skew)
    expert_map = None
    if call.elsewhere:
        expert_map = torch.full((known,), -1, dtype=torch.int32, device=DEVICE)
        here = torch.randperm(known, device=DEVICE)[: call.shape.experts]
        expert_map[here] = torch.arange(call.shape.experts, dtype=torch.int32, device=DEVICE)
    return x, ids.long() if call.wide else ids, weights, layer.weights, expert_map


def error_of(call: Call, layer: Layer) -> float:
    """Relative error to float64; infinite where the same call gives other bits in a graph."""
    x, ids, weights, experts, expert_map = operands(call, layer)
    decision = call.decision()

    def launch(_: int = 0) -> Tensor:
        return launch_experts(x, ids, weights, experts, call.activation, expert_map, decision)

    poison = torch.full((4 * x.numel() * call.shape.top + 4096,), torch.nan, dtype=x.dtype, device=DEVICE)
    del poison
    found = launch()
    expected = layer.reference(x, ids, weights, call.activation, expert_map)
    again: list[Tensor] = []
    recording = capture(lambda index: again.append(launch()), 2)
    recording.graph.replay()
    torch.cuda.synchronize()
    if not all(torch.equal(found, one) for one in again):
        return float("inf")
    if not expected.any():
        return float(found.abs().max())
    return relative_error(found, expected)


def test_random_layers() -> None:
    seed = int(os.environ.get("MARLINQ_FUZZ_SEED") or 0)
    count = int(os.environ.get("MARLINQ_FUZZ_PROBLEMS") or 60)
    rng = random.Random(seed)
    calls = draw_calls(rng, count)
    device = device_numbers(0)
    wanted = [
        one
        for call in calls
        for one in instantiations(call.layer(), call.decision(), call.activation, wide=call.wide)
    ]
    compile_missing(device.architecture, list(dict.fromkeys(wanted)))
    print(f"{len(set(wanted))} kernels")
    failures = []
    for number, call in enumerate(calls):
        if number % _LAYERS == 0:
            torch.manual_seed(call.seed)
            layer = random_layer(call.shape, DEVICE)
        error = error_of(call, layer)
        # Between the products numbers are rounded once more than in one product.
        if not error < 2 * BOUND[call.shape.dtype]:
            failures.append(f"relative error {error:.2e}: {call}")
    assert not failures, f"MARLINQ_FUZZ_SEED={seed}, {len(failures)} of {count}:\n" + "\n".join(failures[:20])


def test_a_graph_takes_any_routing() -> None:
    shape = Shape(16, 4, 256, 192, 64)
    layer = random_layer(shape, DEVICE)
    x, ids, weights = random_routing(shape, 40, DEVICE)
    out: list[Tensor] = []
    routed_experts(x, ids, weights, layer.weights)
    recording = capture(lambda _: out.append(routed_experts(x, ids, weights, layer.weights)), 1)
    for skew in (0.0, 3.0, 0.5):
        values = random_routing(shape, 40, DEVICE, skew)
        for target, value in zip((x, ids, weights), values, strict=True):
            target.copy_(value)
        recording.graph.replay()
        expected = reference_experts(x.float(), ids, weights, layer.weights, "silu")
        assert relative_error(out[0], expected.double()) < 2 * BOUND[shape.dtype]
