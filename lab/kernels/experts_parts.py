"""What a routed layer's launches take, and what its variants take as a whole.

    python lab/kernels/experts_parts.py --model qwen3-30b-a3b --batch 1,16,64,256,1024
    python lab/kernels/experts_parts.py --model qwen3-30b-a3b --batch 16,64 --variants

Times of the first n launches of the layer, in microseconds, as graphs with other experts every launch; the difference from
one line to the next is what a launch adds. With --variants every variant that fits, fastest first.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from marlinq.kernels.experts.choose import ExpertsDecision, decide_experts, decisions
from marlinq.kernels.experts.launch import Workspace, instantiations, layer_steps, shape_of, start
from marlinq.kernels.jit.cache import compile_missing
from marlinq.kernels.launch.driver import on_device
from marlinq.kernels.launch.launch import device_numbers
from marlinq.operations.bench.expert_peers import EXPERT_LAYERS
from marlinq.operations.bench.experts import even_routings
from marlinq.operations.bench.synthetic_experts import random_experts
from marlinq.operations.bench.timing import capture, launches_for, time_in_turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(EXPERT_LAYERS), required=True)
    parser.add_argument("--batch", default="1,16,64,256,1024,4096")
    parser.add_argument("--variants", action="store_true")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    for name in arguments.model:
        layer = EXPERT_LAYERS[name]
        weights = random_experts(layer, 128, asymmetric=False, dtype=torch.float16, device=device)
        expert_bytes = (weights.gate_up.nbytes + weights.down.nbytes) // layer.experts
        for m in (int(text) for text in arguments.batch.split(",")):
            x = torch.randn(m, layer.hidden, dtype=torch.float16, device=device)
            routings = even_routings(layer, m, device, expert_bytes)
            shape = shape_of(x, routings[0].ids, weights)
            chosen = decide_experts(shape, device_numbers(0))
            listed = decisions(shape, device_numbers(0)) if arguments.variants else [chosen]
            kernels = [one for each in listed for one in instantiations(shape, each, "silu", x.dtype, wide=False)]
            compile_missing(device_numbers(0).architecture, list(dict.fromkeys(kernels)))

            def graph(decision: ExpertsDecision, most: int) -> tuple[torch.cuda.CUDAGraph, int]:
                workspace = Workspace.of(shape, decision, x.dtype, device)
                out = torch.empty_like(x)
                keep.append((workspace, out))

                def launch(index: int) -> None:
                    routing = routings[index % len(routings)]
                    given = (x, routing.ids, routing.weights, weights, "silu", None, out, workspace)
                    with on_device(0):
                        start(layer_steps(shape, decision, *given, dependent=True)[:most], 0)

                launch(0)
                count = launches_for(5e-5 if m < 256 else 5e-4)
                return capture(launch, count), count

            keep: list[tuple[Workspace, Tensor]] = []
            if arguments.variants:
                graphs = {decision.reason: graph(decision, 9) for decision in listed}
                print(f"{name} M={m}, chosen: {chosen.reason}")
                found = time_in_turn(graphs, 1e-4)
                for reason in sorted(found, key=lambda reason: found[reason]):
                    print(f"  {1e6 * found[reason]:8.1f}  {reason}")
                continue
            graphs = {}
            given = (x, routings[0].ids, routings[0].weights, weights, "silu", None, x)
            workspace = Workspace.of(shape, chosen, x.dtype, device)
            names = [
                step.instantiation.function
                for step in layer_steps(shape, chosen, *given, workspace, dependent=True)
            ]
            for most in range(1, len(names) + 1):
                graphs[" ".join(names[:most])] = graph(chosen, most)
            found = time_in_turn(graphs, 1e-4)
            print(f"{name} M={m}: {chosen.reason}")
            for steps, seconds in found.items():
                print(f"  {1e6 * seconds:8.1f}  {steps}")


if __name__ == "__main__":
    main()
