"""Time a decode step's layers with other variants of one product at a time.

    python lab/kernels/step_variants.py --batch 4 --context 512 --variants 8 --json chain.json

A product's variant is chosen by a model of its own time (``marlinq.kernels.decide``); in a chain it also
matters how it begins and ends beside its neighbours. For each product of Llama-3-8B's shape, or of one with
another ``--inner`` width, the variants that the model expects to be fastest take the place of the chosen one
in all layers. us a layer, without the head. The best ``--finalists`` of them are timed ``--repeat`` times
more, in turn with the chosen one; those times alone are written, for ``lab/kernels/tune.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import step_parts
from step_parts import HEADS, HIDDEN, INNER, KV, D, random_model, step_milliseconds

from marlinq.core.progress import no_progress
from marlinq.kernels import Device, Problem, dependent_launches, device_numbers
from marlinq.kernels.decide import decision
from marlinq.kernels.decide.decision import Demands, KernelConfig
from marlinq.kernels.launch.launch import precompile_variants
from marlinq.operations.bench.hardware import hardware_line
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.walk import Recording

# Rows up to which a chain's products are launched dependently.
_OVERLAPPING_ROWS = 32
_chosen_by_model = decision.model_choice
_forced: dict[Problem, KernelConfig] = {}


def _choice(problem: Problem, device: Device, demanded: Demands) -> tuple[float, str, KernelConfig]:
    forced = _forced.get(problem)
    return _chosen_by_model(problem, device, demanded) if forced is None else (0.0, "forced", forced)


def force(problem: Problem | None = None, config: KernelConfig | None = None) -> None:
    """Decide for ``config`` from now on; without arguments as always."""
    _forced.clear()
    decision._decide.cache_clear()
    if problem is not None and config is not None:
        _forced[problem] = config


def listed(problem: Problem, demanded: Demands, count: int) -> list[tuple[float, KernelConfig]]:
    """The ``count`` variants that the model expects to be fastest, two at most that differ in stages only.

    And half as many of the bulk kernel, which the model leaves out of chains; not for up to eight rows.
    Behind a norm it needs a kernel for that norm, which then counts.
    """
    device = device_numbers(0)
    found = _fastest(decision._all_estimates(problem, device, demanded), count)
    if demanded.dependent and 8 < problem.m <= 16 and not problem.activation:
        found += _fastest(decision.estimates(problem, device, "bulk"), count // 2)
    return found


def _fastest(
    estimates: Iterable[tuple[float, str, KernelConfig]], count: int
) -> list[tuple[float, KernelConfig]]:
    found: list[tuple[float, KernelConfig]] = []
    alike: dict[KernelConfig, int] = {}
    for seconds, _, config in sorted(estimates, key=lambda one: one[0]):
        key = replace(config, stages=0, min_blocks=1)
        alike[key] = alike.get(key, 0) + 1
        if alike[key] <= 2:
            found.append((seconds, config))
        if len(found) == count:
            break
    return found


def products(inner: int) -> dict[str, tuple[int, int, str | None]]:
    """N, K and activation of a layer's products."""
    return {
        "qkv": ((HEADS + 2 * KV) * D, HIDDEN, None),
        "o": (HIDDEN, HEADS * D, None),
        "gate_up": (2 * inner, HIDDEN, "silu"),
        "down": (HIDDEN, inner, None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--inner", type=int, default=INNER)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--bfloat16", action="store_true", help="activations and scales")
    parser.add_argument("--variants", type=int, default=8, help="a product")
    parser.add_argument("--finalists", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the step needs a GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    hardware = hardware_line(torch.device("cuda", 0))
    print(hardware)
    decision.model_choice = _choice  # type: ignore[assignment]
    step_parts.DTYPE = torch.bfloat16 if arguments.bfloat16 else torch.float16
    model, anatomy = random_model(arguments.layers, arguments.inner)
    rows: list[dict[str, Any]] = []
    for batch in arguments.batch or [4, 16, 64]:
        rows += _sweep(model, anatomy, batch, arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps({"hardware": hardware, "rows": rows}), encoding="utf-8")
    return 0


def _sweep(
    model: torch.nn.Module, anatomy: object, batch: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    overlapping = batch <= _OVERLAPPING_ROWS
    demanded = Demands(dependent=overlapping)
    plans = {}
    for name, (n, k, activation) in products(arguments.inner).items():
        problem = Problem(batch, n, k, 128, False, arguments.bfloat16, activation=activation)
        plans[name] = problem, listed(problem, demanded, arguments.variants)
    precompile_variants((problem, config) for problem, plan in plans.values() for _, config in plan)
    own = ChainForward(model, anatomy, batch=batch, capacity=arguments.context + 64)  # type: ignore[arg-type]

    def microseconds() -> float:
        with own.on_device(), dependent_launches() if overlapping else nullcontext():
            starts = Recording(own, no_progress).starts[:-1]
        return 1e3 * step_milliseconds(own, arguments.context, starts) / arguments.layers

    base = microseconds()
    print(f"batch {batch}, context {arguments.context}: {base:.2f} us a layer")
    measured = []
    for name, (problem, plan) in plans.items():
        chosen = _chosen_by_model(problem, device_numbers(0), demanded)[2]
        rows = []
        for seconds, config in plan:
            force(problem, config)
            rows.append((microseconds() - base, seconds, config))
        rows.sort(key=lambda row: row[0])
        finalists = [config for _, _, config in rows if config != chosen][: arguments.finalists]
        times: dict[KernelConfig, list[float]] = {config: [] for config in (chosen, *finalists)}
        for _ in range(arguments.repeat):
            for config, taken in times.items():
                force(problem, config)
                taken.append(microseconds())
        force()
        for gained, seconds, config in rows:
            mark = "  (chosen)" if config == chosen else ""
            if config in times:
                mark += f"  again {statistics.fmean(times[config]) - statistics.fmean(times[chosen]):+.2f}"
            print(f"  {name:8s} {gained:+6.2f} us, expected {1e6 * seconds:5.2f}: {config}{mark}")
        measured.append(_row(problem, overlapping, times))
    return measured


def _row(problem: Problem, dependent: bool, times: dict[KernelConfig, list[float]]) -> dict[str, Any]:
    """What ``tune.py`` reads: seconds of a layer with each variant."""
    candidates = [
        {
            "kernel": decision._kernel_of(config),
            "config": asdict(config),
            "seconds": 1e-6 * statistics.fmean(taken),
            "standard_error": 1e-6 * statistics.stdev(taken) / len(taken) ** 0.5,
        }
        for config, taken in times.items()
    ]
    key = {"m": problem.m, "n": problem.n, "k": problem.k, "group_size": problem.group_size}
    key["bfloat16"] = problem.bfloat16
    return {**key, "activation": problem.activation, "dependent": dependent, "candidates": candidates}


if __name__ == "__main__":
    sys.exit(main())
