"""Times of every configuration of the sparse kernel, beside the one that is chosen and the dense kernel.

    python lab/kernels/sparse_sweep.py [--shape NxK ...] [--batch M,M,...] [--group-size G] [--json OUT]

L2 cold, graph replay, contenders in turn. A line for each shape and batch: the fastest configuration, the
chosen one and what it loses, and the dense product of the same values.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.kernels import device_numbers
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.sparse import SparseConfig, SparseOperand, candidates, choose
from marlinq.kernels.sparse.launch import launch, prepare
from marlinq.operations.bench.peers.own import Marlinq
from marlinq.operations.bench.peers.sparse import operand_of
from marlinq.operations.bench.shapes import Layer
from marlinq.operations.bench.timing import capture, copies_for, time_in_turn
from marlinq.operations.bench.weights import pruned, random_weight

_LAUNCHES = 20


def main() -> None:
    """Measure and print."""
    options = _options()
    device, granularity = device_numbers(0), Granularity.from_group_size(options.group_size)
    found: list[dict[str, Any]] = []
    for shape in options.shapes or ("6144x4096", "4096x4096", "28672x4096", "4096x14336"):
        n, k = map(int, shape.split("x"))
        made = random_weight(
            Layer(shape, n, k),
            granularity,
            asymmetric=False,
            dtype=torch.float16,
            device=torch.device("cuda"),
            weight_format=INT4,
        )
        weight = pruned(made)
        operand = operand_of(weight)
        copies = [
            replace(operand, words=operand.words.clone(), masks=operand.masks.clone())
            for _ in range(copies_for(operand.nbytes, operand.words.device))
        ]
        for m in map(int, options.batch.split(",")):
            x = torch.randn(m, k, dtype=torch.float16, device="cuda")
            out = torch.empty(m, n, dtype=torch.float16, device="cuda")
            graphs = {}
            for config in candidates(m, k, device, granularity):
                run = partial(_run, config, copies, x, out)
                run(0)
                graphs[str(config)] = capture(run, _LAUNCHES), _LAUNCHES
            dense_copies = copies_for(weight.nbytes, operand.words.device)
            dense = Marlinq().prepare(weight, dense_copies, (m,))
            dense(0, x)
            graphs["dense"] = capture(partial(_dense, dense, dense_copies, x), _LAUNCHES), _LAUNCHES
            seconds = time_in_turn(graphs, 1e-5)
            chosen = choose(m, n, k, device, granularity)
            ours = {name: value for name, value in seconds.items() if name != "dense"}
            best = min(ours, key=lambda name: ours[name])
            print(
                f"{shape:12} M={m:<4} best {ours[best] * 1e6:7.2f} us {best}; chosen "
                f"{ours[str(chosen)] * 1e6:7.2f} ({ours[str(chosen)] / ours[best]:.2f}x); dense "
                f"{seconds['dense'] * 1e6:7.2f}, best / dense {ours[best] / seconds['dense']:.2f}",
                flush=True,
            )
            found.append({"n": n, "k": k, "m": m, "chosen": asdict(chosen), "seconds": seconds})
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _run(config: SparseConfig, copies: list[SparseOperand], x: Tensor, out: Tensor, index: int) -> None:
    launch(prepare(config, copies[index % len(copies)], x, None, out), x.get_device())


def _dense(run: Any, copies: int, x: Tensor, index: int) -> object:
    return run(index % copies, x)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", dest="shapes", action="append", metavar="NxK")
    parser.add_argument("--batch", default="1,8,16,64")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
