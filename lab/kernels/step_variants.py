"""Time a decode step's layers with other variants of one dense product at a time.

    python lab/kernels/step_variants.py --synthetic llama-3-8b --batch 4 --context 512 --json chain.json

A product's variant is chosen by a model of its own time (``marlinq.kernels.decide``) or was recorded; in a
chain it also matters how it begins and ends beside its neighbours. For each product of a layer the variants
that the model expects to be fastest, of each kernel, take the place of the present one in all layers, with
the norms and activations in it that the step has. Each variant is a captured step without the head. All of a
product are replayed in turn, then the fastest of them, also with shorter rings, ``--repeat`` times. us a
layer. Last, the variants that gained most run together. ``lab/kernels/tune.py`` reads what ``--json`` writes.

Routed layers take experts that no rounding changes: another choice reads other weights, whose time differs
by more than the variants do.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from marlinq.core.errors import MarlinqError
from marlinq.core.progress import no_progress
from marlinq.kernels import Device, Problem, dependent_launches, device_numbers
from marlinq.kernels.choose import decision
from marlinq.kernels.choose.measured import MeasuredChoice
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.demands import Demands
from marlinq.kernels.launch.precompile import precompile_instantiations
from marlinq.kernels.variants.stream import StreamConfig
from marlinq.models.anatomy import Anatomy, Mixture
from marlinq.models.recognise import anatomy_of
from marlinq.operations.bench import Synthetic, synthetic_model
from marlinq.operations.bench.hardware import hardware_line
from marlinq.runtime.step import chain
from marlinq.runtime.step.bound import BoundMLP
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.products import Product
from marlinq.runtime.step.recorded_step import RecordedStep

# Rows up to which a chain's products are launched dependently.
_OVERLAPPING_ROWS = 32
_REPLAYS = 5
# Times in turn that decide who is timed more often, and shares of a ring that the fastest are tried with.
_FIRST_ROUNDS, _RINGS = 3, (0.8, 0.65, 0.5)
_DEVICE = torch.device("cuda", 0)
_decision: Any = decision
_recorded = _decision.measured_choice
_forced: dict[Problem, Configuration] = {}


def _tuned(problem: Problem, device: Device, dependent: bool = False) -> MeasuredChoice | None:
    forced = _forced.get(problem)
    # Without seconds it is never too slow for an activation.
    return _recorded(problem, device, dependent) if forced is None else MeasuredChoice(forced, 0.0)


def force(choices: dict[Problem, Configuration]) -> None:
    """Decide for these from now on, and for all others as always."""
    _forced.clear()
    _forced.update(choices)
    decision._decide.cache_clear()


class Rows(NamedTuple):
    """Work of a product on whole rows in the step (:mod:`marlinq.kernels.contract.whole_rows`)."""

    normed: bool = False
    adds: bool = False


def listed(
    problem: Problem, device: Device, demanded: Demands, count: int, work: Rows
) -> list[Configuration]:
    """The present choice, the model's, and the ``count`` of each kernel that are expected to be fastest and
    do the same work on rows; in a chain those that gain by overlap.

    Of the stream kernel for a single row also those that multiply several; of the kernels with a ring also as
    few stages as hold all that a block reads.
    """

    def suits(config: Configuration) -> bool:
        if not config.activates(problem):
            return False
        if demanded.dependent and not decision.gains_by_overlap(config):
            return False
        return not any(work) or config.row_variant(problem, **work._asdict()) is not None

    found = [decision.decide(problem, device).config, decision.model_choice(problem, device, demanded)[2]]
    few = replace(problem, m=4)
    sources: list[tuple[Problem, str]] = [(problem, "stream")] if problem.m <= 16 else []
    sources += [(few, "stream")] if problem.m == 1 else []
    sources += [(problem, "bulk")] if problem.m <= 16 and not problem.activation else []
    sources += [(problem, "warpgroup")] if problem.m > 8 else []
    for asked, kernel in sources:
        estimates = decision.estimates(asked, device, kernel)
        found += islice(_fastest(one for one in estimates if suits(one[2])), count)
    chosen = [config for config in found if config is not None]
    return list(dict.fromkeys((*chosen, *(one for config in chosen for one in _as_long(problem, config)))))


def _fastest(estimates: Iterable[tuple[float, str, Configuration]]) -> Iterator[Configuration]:
    """In their order; two at most that differ in stages only."""
    alike: dict[Configuration, int] = {}
    for _, _, config in sorted(estimates, key=lambda one: one[0]):
        key = replace(config, stages=0, min_blocks=1)
        alike[key] = alike.get(key, 0) + 1
        if alike[key] <= 2:
            yield config


def _as_long(problem: Problem, config: Any) -> list[Configuration]:
    """With stages for all chunks of a block, where that is fewer than it has."""
    chunks = -(-problem.k // (16 * config.rows))
    parts = config.parts // config.cluster
    return _with_stages(config, -(-chunks // config.parts) * parts / config.stages)


def _with_stages(config: Any, share: float) -> list[Configuration]:
    """With that share of its stages, as many for each part of K; none where that is not fewer, or is fewer
    than any variant has."""
    if isinstance(config, StreamConfig):
        return []
    parts = config.parts // config.cluster
    stages = round(share * config.stages) // parts * parts
    return [replace(config, stages=stages)] if 3 * parts <= stages < config.stages else []


def _settle_routing(model: torch.nn.Module, anatomy: Anatomy, tokens: Tensor) -> None:
    """Let each token choose experts of its own, drawn for each layer, whatever its hidden state is otherwise:
    its embedding gets a direction, larger than all that layers add, and routers see these alone."""
    embedding = model.get_submodule(anatomy.embedding).get_parameter("weight").data
    rows, hidden = len(tokens), embedding.shape[1]
    directions = torch.linalg.qr(torch.randn(hidden, rows))[0].T
    given = torch.randn(rows, hidden) + 4 * hidden**0.5 * directions
    embedding[tokens] = given.to(embedding)
    for layer in anatomy.layers:
        if isinstance(layer.mlp, Mixture):
            router = layer.mlp.router
            weight = model.get_submodule(router.module).get_parameter("weight").data
            chosen = torch.rand(router.experts, rows).topk(router.top, 0).indices
            weight.copy_(0.3 * torch.zeros(router.experts, rows).scatter_(0, chosen, 1.0) @ directions)


@dataclass
class Step:
    """A captured step of all layers, and what its launches need to live."""

    recording: RecordedStep
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class Layers:
    """A model's layers, whose step can be captured with any choice of variants."""

    def __init__(self, name: str, layers: int, dtype: torch.dtype, batch: int, context: int) -> None:
        loaded = _models.get((name, dtype))
        if loaded is None:
            _models.clear()
            loaded = synthetic_model(Synthetic(name, layers), device=_DEVICE, dtype=dtype)
            _models[name, dtype] = loaded
            # Prompts are not measured, so their kernels are not compiled.
            chain._prepared_for_prompts.add(loaded.model)
        anatomy = anatomy_of(loaded.model)
        if not isinstance(anatomy, Anatomy):
            raise ValueError(f"{name}: {anatomy.part}: {anatomy.reason}")
        self.overlapping = batch <= _OVERLAPPING_ROWS
        self.context, self.depth = context, layers
        torch.manual_seed(0)
        self._tokens = torch.arange(batch, device=_DEVICE)
        _settle_routing(loaded.model, anatomy, self._tokens)
        self._own = ChainForward(loaded.model, anatomy, batch=batch, capacity=context + 64)
        for layer in self._own.layers:
            layer.keys.normal_()
            layer.values.normal_()
        with self.demanding():
            self.problems = self._problems()
        links = self._own.recorded._links._links.values()
        before, behind = ({id(getattr(link, side)) for link in links} for side in ("before", "behind"))
        # Neither the first layer nor the last, whose norms at the ends have kernels of their own.
        self.work = {
            name: Rows(id(product) in behind, id(product) in before)
            for name, product in self._products(len(self._own.layers) // 2).items()
        }

    def demanding(self) -> AbstractContextManager[object]:
        """Demands of the step on decisions."""
        return dependent_launches() if self.overlapping else nullcontext()

    def _products(self, index: int) -> dict[str, Product]:
        layer = self._own.layers[index]
        assert layer.qkv is not None
        assert layer.output is not None
        found = {"qkv": layer.qkv, "output": layer.output}
        if isinstance(layer.mlp, BoundMLP):
            found |= {"gate_up": layer.mlp.inputs, "down": layer.mlp.down}
        return found

    def _problems(self) -> dict[str, Problem]:
        own, mlp, products = self._own, self._own.layers[0].mlp, self._products(0)
        found = {name: product.problems(own.batch)[0] for name, product in products.items()}
        if isinstance(mlp, BoundMLP):
            activated = mlp.inputs.activated_problem(own.batch, mlp.anatomy.activation, own.device_index)
            found["gate_up"] = activated or found["gate_up"]
        return found

    def precompile(self, variants: Iterable[tuple[str, Configuration]]) -> None:
        """Compile products' variants in parallel."""
        wanted = []
        for name, config in variants:
            problem, work = self.problems[name], self.work[name]
            rows = config.row_variant(problem, **work._asdict()) if any(work) else None
            wanted.append(config.instantiation(problem) if rows is None else rows.instantiation)
        precompile_instantiations(wanted, self._own.device_index)

    def captured(self, name: str, variants: Iterable[Configuration]) -> dict[Configuration, Step]:
        """A step with each variant of a product, but for those that do not run, which is said."""
        steps = {}
        for config in variants:
            try:
                steps[config] = self.capture({self.problems[name]: config})
            except (MarlinqError, RuntimeError, ValueError) as failure:
                force({})
                print(f"  {name:8s} {_short(config)}: {type(failure).__name__}: {str(failure)[:120]}")
        return steps

    def capture(self, choices: dict[Problem, Configuration]) -> Step:
        force(choices)
        own = self._own
        with own.on_device(), self.demanding():
            recording = RecordedStep(own, no_progress)
            own.lengths.fill_(self.context - 1)
            logits = recording.start(self._tokens).float().clone()
            own.lengths.fill_(self.context - 1)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for start in recording.starts[:-1]:
                    start()
        force({})
        return Step(recording, graph, logits)

    def microseconds(self, step: Step) -> float:
        """Time of a layer: the median of a few replays."""
        events = []
        for _ in range(_REPLAYS):
            self._own.lengths.fill_(self.context - 1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step.graph.replay()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return 1e3 * statistics.median(a.elapsed_time(b) for a, b in events) / self.depth

    def in_turn(self, steps: dict[Any, Step], repeat: int) -> dict[Any, list[float]]:
        """us a layer of each, ``repeat`` times."""
        times: dict[Any, list[float]] = {one: [] for one in steps}
        for step in steps.values():
            self.microseconds(step)
        for _ in range(repeat):
            for one, step in steps.items():
                times[one].append(self.microseconds(step))
        return times


_models: dict[tuple[str, torch.dtype], Any] = {}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--synthetic", action="append", help="models' names; llama-3-8b")
    parser.add_argument("--dtype", action="append", choices=["float16", "bfloat16"])
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--variants", type=int, default=4, help="of a product and kernel")
    parser.add_argument("--finalists", type=int, default=5, help="that are timed --repeat times")
    parser.add_argument("--repeat", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the step needs a GPU", file=sys.stderr)
        return 1
    torch.set_grad_enabled(False)
    hardware = hardware_line(_DEVICE)
    print(hardware)
    _decision.measured_choice = _tuned
    rows: list[dict[str, Any]] = []
    for name in arguments.synthetic or ["llama-3-8b"]:
        for dtype in arguments.dtype or ["float16"]:
            for batch in arguments.batch or [4, 16]:
                layers = Layers(name, arguments.layers, getattr(torch, dtype), batch, arguments.context)
                # A capture collects garbage, of which a model's modules are none.
                gc.freeze()
                print(f"{name}, {dtype}, batch {batch}, context {arguments.context}")
                rows += _sweep(layers, arguments)
                if arguments.json:
                    text = json.dumps({"hardware": hardware, "rows": rows})
                    arguments.json.write_text(text, encoding="utf-8")
                del layers
    return 0


def _sweep(layers: Layers, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    demanded = Demands(dependent=layers.overlapping)
    device = device_numbers(0)
    with layers.demanding():
        plans = {
            name: listed(problem, device, demanded, arguments.variants, layers.work[name])
            for name, problem in layers.problems.items()
        }
    layers.precompile((name, config) for name, plan in plans.items() for config in plan)
    rows, gained = [], {}
    for name, problem in layers.problems.items():
        present, model = plans[name][0], decision.model_choice(problem, device, demanded)[2]
        steps = layers.captured(name, plans[name])
        order = _by_time(layers.in_turn(steps, _FIRST_ROUNDS))
        rings = [one for config in order[:3] for share in _RINGS for one in _with_stages(config, share)]
        finalists = list(dict.fromkeys((present, model, *order[: arguments.finalists], *rings)))
        layers.precompile((name, config) for config in finalists)
        steps |= layers.captured(name, [config for config in finalists if config not in steps])
        times = layers.in_turn(
            {config: steps[config] for config in finalists if config in steps}, arguments.repeat
        )
        base = times[present]
        print(f"  {name:8s} {statistics.fmean(base):.2f} us a layer, {problem.k} -> {problem.n}", flush=True)
        for config in _by_time(times):
            marks = "  (present)" * (config == present) + "  (model)" * (config == model)
            print(
                f"    {_difference(times[config], base)}, error {_error(steps[config], steps[present]):.1e}: "
                f"{_short(config)}{marks}"
            )
        best = _by_time(times)[0]
        if best != present:
            gained[problem] = best
        rows.append(_row(problem, layers.overlapping, times))
    together = {"present": layers.capture({}), "best of each": layers.capture(gained)}
    found = layers.in_turn(together, 2 * arguments.repeat)
    print(f"  together {_difference(found['best of each'], found['present'])}", flush=True)
    return rows


def _by_time(times: dict[Configuration, list[float]]) -> list[Configuration]:
    return sorted(times, key=lambda one: statistics.fmean(times[one]))


def _difference(times: list[float], base: list[float]) -> str:
    """Mean of the differences of times taken after one another, and its standard error."""
    apart = [a - b for a, b in zip(times, base, strict=True)]
    return f"{statistics.fmean(apart):+6.2f} +- {statistics.stdev(apart) / len(apart) ** 0.5:.2f} us"


def _error(step: Step, other: Step) -> float:
    """Relative error of logits in the row that differs most."""
    return float(((step.logits - other.logits).norm(dim=-1) / other.logits.norm(dim=-1)).max())


def _short(config: Configuration) -> str:
    values = ", ".join(f"{name} {value}" for name, value in asdict(config).items())
    return f"{config.variant}: {values}"


def _row(problem: Problem, dependent: bool, times: dict[Configuration, list[float]]) -> dict[str, Any]:
    """Input of ``tune.py``: seconds of a layer with each variant."""
    candidates = [
        {
            "kernel": config.variant,
            "config": asdict(config),
            "seconds": 1e-6 * statistics.fmean(taken),
            "standard_error": 1e-6 * statistics.stdev(taken) / math.sqrt(len(taken)),
        }
        for config, taken in times.items()
    ]
    key = {"m": problem.m, "n": problem.n, "k": problem.k, "group_size": problem.granularity.group_size}
    key["bfloat16"] = problem.bfloat16
    return {**key, "activation": problem.activation, "dependent": dependent, "candidates": candidates}


if __name__ == "__main__":
    sys.exit(main())
