"""Time a mixture's decode step by how its experts are launched.

    python lab/kernels/experts_chain.py --batch 4 --batch 16 --layers 12

The way that a layer's experts are launched is chosen by a model of the layer's time alone
(``marlinq.kernels.experts.experts_decision``), but in a chain its launches overlap with others. The fastest
expected way of each kind is recorded as a whole step and replayed in turn with the others. Printed are
microseconds per layer, without the head, over random keys and values, and the distance of its logits from
those of the chosen way.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import torch
from torch import Tensor

from marlinq.core.progress import no_progress
from marlinq.kernels import Device, dependent_launches, device_numbers
from marlinq.kernels.driver.cache import compile_missing
from marlinq.kernels.experts.configurations import ExpertsDecision, ExpertsShape
from marlinq.kernels.experts.experts_decision import decide_experts, direct_variants, sorted_variants
from marlinq.kernels.experts.steps import instantiations
from marlinq.models.anatomy import Anatomy
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.synthetic import Synthetic, synthetic_model
from marlinq.runtime.step import recorded_step
from marlinq.runtime.step.chain import ChainForward
from marlinq.runtime.step.forward_choice import _anatomy
from marlinq.runtime.step.recorded_step import RecordedStep

_REPLAYS = 25
_forced: list[ExpertsDecision | None] = [None]
_asked: list[ExpertsShape] = []


def _decide(shape: ExpertsShape, device: Device) -> ExpertsDecision:
    _asked.append(shape)
    return _forced[0] or decide_experts(shape, device)


def listed(shape: ExpertsShape, device: Device) -> dict[str, ExpertsDecision]:
    """Reason -> decision: the choice first, then the fastest expected decision of every kind."""
    chosen = decide_experts(shape, device)
    ways: list[ExpertsDecision] = [decision for _, decision in direct_variants(shape, device)]
    for local_sort in (False, True):
        ways += [found for _, found in sorted_variants(shape, device) if found.local_sort == local_sort][:2]
    return {f"(chosen) {chosen.reason}": chosen, **{way.reason: way for way in ways if way != chosen}}


def graph_of(recording: RecordedStep, tokens: Tensor) -> torch.cuda.CUDAGraph:
    """A step of ``tokens`` without the head."""
    recording.read_from(tokens)

    def start() -> None:
        for launch in recording.starts[:-1]:
            launch()

    start()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        start()
    return graph


def sweep(model: torch.nn.Module, anatomy: Anatomy, batch: int, context: int) -> None:
    """One line a way."""
    device = device_numbers(0)
    _forced[0] = None
    own = ChainForward(model, anatomy, batch=batch, capacity=context + 64)
    for layer in own.layers:
        layer.keys.normal_()
        layer.values.normal_()
    ways = listed(_asked[-1], device)
    wanted = [one for way in ways.values() for one in instantiations(_asked[-1], way, "silu", wide=False)]
    compile_missing(device.architecture, list(dict.fromkeys(wanted)))
    # Other tokens in every row, which choose other experts.
    tokens = torch.randperm(own.vocabulary, device="cuda")[:batch].contiguous()
    recordings: list[RecordedStep] = []
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    logits: dict[str, Tensor] = {}
    for reason, way in ways.items():
        _forced[0] = way
        with own.on_device():
            recordings.append(RecordedStep(own, no_progress))
            own.lengths.fill_(context - 1)
            logits[reason] = recordings[-1].start(tokens).float()
            graphs[reason] = graph_of(recordings[-1], tokens)
    times: dict[str, list[float]] = {reason: [] for reason in graphs}
    for _ in range(_REPLAYS):
        for reason, graph in graphs.items():
            own.lengths.fill_(context - 1)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[reason].append(begin.elapsed_time(end))
    print(f"batch {batch}, context {context}")
    first = next(iter(logits.values()))
    for reason, found in times.items():
        distance = float((logits[reason] - first).norm() / first.norm())
        each = 1e3 * statistics.median(found) / len(own.layers)
        print(f"  {each:7.2f} us a layer, logits {distance:.1e}: {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--model", default="qwen3-30b-a3b", help="a mixture of marlinq bench decode --synthetic"
    )
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the step needs a GPU", file=sys.stderr)
        return 1
    torch.set_grad_enabled(False)
    print(hardware_line(torch.device("cuda", 0)))
    loaded = synthetic_model(Synthetic(arguments.model, arguments.layers), device="cuda", dtype="float16")
    anatomy = _anatomy(loaded)
    if not isinstance(anatomy, Anatomy):
        print(f"error: {anatomy.part}: {anatomy.reason}", file=sys.stderr)
        return 1
    patched: Any = recorded_step
    patched.decide_experts = _decide
    with dependent_launches():
        for batch in arguments.batch or [4, 16]:
            sweep(loaded.model, anatomy, batch, arguments.context)
    return 0


if __name__ == "__main__":
    sys.exit(main())
