"""Time the candidates of the kernels against each other, and the cost model against them.

    python lab/kernels/kernel_sweep.py --kernel stream --kernel warpgroup --model llama-3-8b --batch 1,16,64
    python lab/kernels/kernel_sweep.py --kernel bulk --model llama-3-8b --batch 1,16 --sparse

For every layer and batch the model's best candidates are compiled, checked against the first one's output
and timed: captured launches over rotating copies of the weight, so that it comes from device memory, the
candidates in turn, since large products slow the clock down for whoever comes later. The table gives the
fastest, the time the model expected of it, and where the model's own choice came in.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from marlinq.core.granularity import Granularity
from marlinq.kernels import KERNELS, Problem
from marlinq.kernels.choose.decision import estimates
from marlinq.kernels.contract.configuration import Configuration
from marlinq.kernels.contract.product_tensors import ProductTensors
from marlinq.kernels.contract.weight_formats import INT4, INT4_SPARSE
from marlinq.kernels.driver.gpu_rates import device_numbers
from marlinq.kernels.launch.call import launch_gemm
from marlinq.kernels.launch.precompile import precompile_variants
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.peers.sparse import sparse_weight
from marlinq.operations.bench.shapes import MODELS, layers_of
from marlinq.operations.bench.timing import capture, copies_for, launches_for, time_in_turn
from marlinq.operations.bench.weights import Weight, pruned, random_weight

Candidate = tuple[float, str, str, Configuration]
# Two variants differ by rounding alone: each is within 1e-3 of the exact product.
TOLERANCE = 2e-3
_WORTH = 1.8


def candidates(problem: Problem, kernels: list[str], most: int, sample: int, index: int) -> list[Candidate]:
    """(expected seconds, bound, kernel, config): of every kernel the model's best ``most``, and ``sample``
    of the others that it expects to take less than ``_WORTH`` times the best."""
    chance = random.Random(0)
    found = []
    for kernel in kernels:
        listed = sorted(
            (
                (seconds, bound, kernel, config)
                for seconds, bound, config in estimates(problem, device_numbers(index), kernel)
            ),
            key=itemgetter(0),
        )
        others = [candidate for candidate in listed[most:] if candidate[0] < _WORTH * listed[0][0]]
        found += listed[:most] + chance.sample(others, min(sample, len(others)))
    return found


def measure(weight: Weight, m: int, listed: list[Candidate], device: torch.device) -> list[dict[str, Any]]:
    """Every candidate's time, fastest first; one whose result differs from the first one's is left out."""
    copies = [
        replace(
            weight.operand,
            words=weight.words.clone(),
            scales=weight.scales.clone(),
            zeros=None if weight.zeros is None else weight.zeros.clone(),
        )
        for _ in range(copies_for(weight.nbytes, device))
    ]
    x = torch.randn(m, weight.layer.k, dtype=torch.float16, device=device)
    out = torch.empty(m, weight.layer.n, dtype=torch.float16, device=device)

    def launch(config: Configuration, index: int) -> None:
        launch_gemm(ProductTensors(x, copies[index % len(copies)], None, out), config)

    first: torch.Tensor | None = None
    recordings = {}
    longest = max(expected for expected, *_ in listed)
    launches = launches_for(longest)
    for number, (_, _, kernel, config) in enumerate(listed):
        out.fill_(float("nan"))
        launch(config, 0)
        result = out.float()
        first = result if first is None else first
        error = float((result - first).norm() / first.norm())
        if not error < TOLERANCE:
            print(f"  WRONG {weight.layer.name} M={m} {kernel} {config}: differs by {error:.1e}", flush=True)
            continue
        recordings[str(number)] = capture(partial(launch, config), launches)
    timed = []
    for name, seconds in time_in_turn(recordings, longest).items():
        expected, bound, kernel, config = listed[int(name)]
        timed.append(
            {
                "seconds": seconds,
                "expected": expected,
                "bound": bound,
                "kernel": kernel,
                "config": asdict(config),
            }
        )
    return sorted(timed, key=lambda row: row["seconds"])


def show(name: str, m: int, timed: list[dict[str, Any]], most: int) -> None:
    """A line for the cell, and the fastest candidates."""
    if not timed:
        print(f"{name:22} M={m:<5} no candidate gave a result")
        return
    own = min(range(len(timed)), key=lambda place: timed[place]["expected"])
    print(
        f"{name:22} M={m:<5} best {timed[0]['seconds'] * 1e6:7.2f} us "
        f"(expected {timed[0]['expected'] * 1e6:.2f}), "
        f"the model's choice {timed[own]['seconds'] * 1e6:.2f} (place {own + 1} of {len(timed)})"
    )
    for row in timed[:most]:
        parameters = " ".join(f"{key}={value}" for key, value in row["config"].items())
        print(f"    {row['seconds'] * 1e6:7.2f} us  {row['kernel']:9} {parameters}", flush=True)


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        print("error: the sweep needs a GPU", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    group, asymmetric = arguments.group_size, arguments.asymmetric
    granularity = Granularity.from_group_size(group)
    weight_format = INT4_SPARSE if arguments.sparse else INT4
    cells = [
        (layer, Problem(int(m), layer.n, layer.k, granularity, asymmetric, False, weight_format))
        for layer in layers_of(arguments.model, arguments.shape, group)
        for m in arguments.batch.split(",")
    ]
    listed = [
        candidates(problem, arguments.kernel, arguments.most, arguments.sample, device.index)
        for _, problem in cells
    ]
    variants = [
        (problem, candidate[3])
        for (_, problem), found in zip(cells, listed, strict=True)
        for candidate in found
    ]
    print(hardware_line(device))
    print(f"{precompile_variants(variants, device.index)} variants compiled", flush=True)
    rows = []
    for (layer, problem), found in zip(cells, listed, strict=True):
        weight = random_weight(
            layer, granularity, asymmetric=asymmetric, dtype=torch.float16, device=device, weight_format=INT4
        )
        if arguments.sparse:
            weight = sparse_weight(pruned(weight))
        timed = measure(weight, problem.m, found, device)
        show(layer.name, problem.m, timed, arguments.show)
        row = {"layer": layer.name, "n": layer.n, "k": layer.k, "m": problem.m}
        row |= {"format": weight_format.name, "group_size": group, "asymmetric": asymmetric}
        rows.append({**row, "candidates": timed})
        # A sweep that is cut off keeps what it has.
        if arguments.json:
            arguments.json.write_text(json.dumps({"hardware": hardware_line(device), "rows": rows}))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="repeatable; default: all")
    parser.add_argument("--model", action="append", choices=sorted(MODELS), default=[])
    parser.add_argument("--shape", action="append", default=[], help="further shapes, NAME=NxK")
    parser.add_argument("--batch", default="1,8,16,32,64,128,256", help="rows of activations, M,M,...")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--asymmetric", action="store_true")
    parser.add_argument("--sparse", action="store_true", help="2:4 sparse weights, without zero points")
    parser.add_argument("--most", type=int, default=24, help="candidates of every kernel to time")
    parser.add_argument("--sample", type=int, default=0, help="further candidates, chosen at random")
    parser.add_argument("--show", type=int, default=3, help="fastest candidates to print")
    parser.add_argument("--json", type=Path, help="where to write every time")
    arguments = parser.parse_args()
    arguments.kernel = arguments.kernel or list(KERNELS)
    if not arguments.model and not arguments.shape:
        arguments.model = ["llama-3-8b"]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
