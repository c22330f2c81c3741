"""Times the launches of a layer of experts, and whole layers with all variants.

    python lab/kernels/experts_parts.py --model qwen3-30b-a3b --batch 1,16,64,256,1024
    python lab/kernels/experts_parts.py --model qwen3-30b-a3b --batch 16,64 --variants

    python lab/kernels/experts_parts.py --model qwen3-30b-a3b --batch 4,16 --direct 20 --json sweep.json

Times of the first n launches of the layer, in microseconds, in CUDA graphs with other experts every launch;
the difference from one line to the next is what a launch adds. With --variants every variant that fits,
fastest first. With --direct as many variants of each of the two launches without sorting, by what is
expected; the JSON is for fitting what is expected.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.driver.cuda_driver import on_device
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.experts import ExpertWeights
from marlinq.kernels.experts.configurations import DirectDecision, ExpertsDecision, ExpertsShape
from marlinq.kernels.experts.experts_decision import _alone, _shared, decide_experts, decisions
from marlinq.kernels.experts.launch import start
from marlinq.kernels.experts.steps import instantiations, placed_steps, shape_of
from marlinq.kernels.experts.workspace import ExpertsWorkspace
from marlinq.operations.bench.expert_shapes import EXPERT_LAYERS, ExpertsLayer
from marlinq.operations.bench.experts import even_routings
from marlinq.operations.bench.peers.contenders import Routing
from marlinq.operations.bench.synthetic_experts import random_experts
from marlinq.operations.bench.timing import GraphRecording, capture, launches_for, time_in_turn


@dataclass
class Batch:
    """Operands of one layer and batch."""

    weights: ExpertWeights
    x: Tensor
    routings: list[Routing]
    shape: ExpertsShape

    @classmethod
    def of(cls, layer: ExpertsLayer, weights: ExpertWeights, m: int) -> Batch:
        device = weights.down.words.device
        expert_bytes = (weights.gate_up.nbytes + weights.down.nbytes) // layer.experts
        x = torch.randn(m, layer.hidden, dtype=torch.float16, device=device)
        routings = even_routings(layer, m, device, expert_bytes)
        return cls(weights, x, routings, shape_of(x, routings[0].ids, weights))

    def record(self, decision: ExpertsDecision, most: int, first: int = 0) -> GraphRecording:
        """A CUDA graph that repeats launches ``first`` to ``most - 1``."""
        workspace = ExpertsWorkspace.of(self.shape, decision, self.x.device)
        out = torch.empty_like(self.x)

        def launch(index: int) -> None:
            routing = self.routings[index % len(self.routings)]
            given = (self.x, routing.ids, routing.weights, self.weights, "silu", None, out, workspace)
            with on_device(0):
                start(placed_steps(self.shape, decision, *given, dependent=True)[first:most], 0)

        launch(0)
        return capture(launch, launches_for(5e-5 if self.shape.m < 256 else 5e-4))

    def compile(self, listed: list[ExpertsDecision]) -> None:
        found = [one for each in listed for one in instantiations(self.shape, each, "silu", wide=False)]
        compile_missing(device_numbers(0).architecture, list(dict.fromkeys(found)))

    def variants(self) -> None:
        """Times and prints whole layers with every variant."""
        listed = decisions(self.shape, device_numbers(0))
        self.compile(listed)
        recordings = {decision.reason: self.record(decision, 9) for decision in listed}
        recordings |= {
            f"first launch: {decision.reason}": self.record(decision, 1)
            for decision in listed
            if isinstance(decision, DirectDecision)
        }
        found = time_in_turn(recordings, 1e-4)
        for reason in sorted(found, key=lambda reason: found[reason]):
            print(f"  {1e6 * found[reason]:8.1f}  {reason}")

    def direct(self, most: int) -> list[dict[str, Any]]:
        """Each launch without sorting alone, by variant; the first few of every way by what is expected."""
        listed = []
        for gated in (True, False):
            for way in (_alone, _shared):
                found = sorted(way(self.shape, device_numbers(0), gated=gated), key=lambda timed: timed[0])
                listed += found[: most if way is _shared else 2]
        both: list[ExpertsDecision] = [DirectDecision(config, config, "") for _, config in listed]
        self.compile(both)
        recordings = {}
        for number, ((_, config), decision) in enumerate(zip(listed, both, strict=True)):
            recordings[str(number)] = self.record(
                decision, 1 if config.gated else 2, 0 if config.gated else 1
            )
        times = time_in_turn(recordings, 3e-5)
        rows = []
        for number, (expected, config) in enumerate(listed):
            tile, row = config.tile, dict[str, Any](m=self.shape.m, gated=config.gated)
            row |= {
                "columns": config.columns,
                "warps_n": tile.warps_n,
                "warps_k": tile.warps_k,
                "cluster": tile.cluster,
            }
            row |= {"stages": tile.stages, "blocks": tile.min_blocks}
            row |= {"seconds": times[str(number)], "expected": expected}
            rows.append(row)
        rows.sort(key=lambda row: (row["gated"], row["seconds"]))
        for row in rows:
            sizes = ("warps_n", "warps_k", "cluster", "stages", "blocks")
            variant = " x ".join(str(row[key]) for key in sizes)
            print(
                f"  {'first' if row['gated'] else 'second':6s} {1e6 * row['seconds']:7.1f} "
                f"({1e6 * row['expected']:.1f} expected)  {row['columns']} together, {variant}"
            )
        return rows

    def parts(self, chosen: ExpertsDecision) -> None:
        """Times and prints the first n launches of the decision, for every n."""
        self.compile([chosen])
        routing = self.routings[0]
        workspace = ExpertsWorkspace.of(self.shape, chosen, self.x.device)
        given = (self.x, routing.ids, routing.weights, self.weights, "silu", None, self.x, workspace)
        steps = placed_steps(self.shape, chosen, *given, dependent=True)
        names = [step.instantiation.function for step in steps]
        recordings = {" ".join(names[:most]): self.record(chosen, most) for most in range(1, len(names) + 1)}
        for done, seconds in time_in_turn(recordings, 1e-4).items():
            print(f"  {1e6 * seconds:8.1f}  {done}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", choices=sorted(EXPERT_LAYERS), required=True)
    parser.add_argument("--batch", default="1,16,64,256,1024,4096")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--direct", type=int, metavar="N")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.model:
        layer, device = EXPERT_LAYERS[name], torch.device("cuda", 0)
        weights = random_experts(
            layer,
            Granularity.group(128),
            asymmetric=False,
            dtype=torch.float16,
            device=device,
            weight_format=INT4,
        )
        for m in (int(text) for text in arguments.batch.split(",")):
            batch = Batch.of(layer, weights, m)
            chosen = decide_experts(batch.shape, device_numbers(0))
            touched = len(set(batch.routings[0].ids.flatten().tolist()))
            print(f"{name} M={m}, {touched} experts: {chosen.reason}", flush=True)
            if arguments.direct:
                cell = {"model": name, "touched": touched}
                rows += [cell | row for row in batch.direct(arguments.direct)]
            elif arguments.variants:
                batch.variants()
            else:
                batch.parts(chosen)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
