"""Time a decode step's chain of products: 32 layers of qkv, o, gate_up and down, each fed by the one before.

    python lab/kernels/decode_chain.py --batch 1 --batch 16

The chain is one captured graph. Between two products stands a small element-wise kernel that needs all of
the first one's output. Every layer has its own weights, so they come from device memory. The W4A16 kernel
runs with ordinary launches and with programmatic dependent launch, where the weights of a product are
requested while the kernels before it still run. Dense cuBLAS, and Humming where it is installed, run with
ordinary launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from marlinq.core.errors import MarlinqError
from marlinq.core.granularity import Granularity
from marlinq.kernels import dependent_launches
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.kernels.driver.raw_kernel import INT32, POINTER, RawKernel
from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.bench.peers import PEERS
from marlinq.operations.bench.peers.contenders import Contender, Run
from marlinq.operations.bench.peers.own import Marlinq
from marlinq.operations.bench.shapes import MODELS, LinearSize
from marlinq.operations.bench.timing import capture, time_in_turn
from marlinq.operations.bench.weights import random_weight

_GLUE = str(Path(__file__).with_name("chain_glue.cuh").resolve())
_THREADS = 128
_SLICE, _ADD, _SILU = 0, 1, 2
# Kernels that follow the products qkv, o, gate_up and down.
_MODES = (_SLICE, _ADD, _SILU, _ADD)


def glue(mode: int) -> Instantiation:
    """The kernel between two products; see its header comment."""
    return Instantiation(_GLUE, "chain_glue", (("Element", "Half"), ("MODE", mode)))


class Glue:
    """The element-wise kernel after one product."""

    def __init__(self, mode: int, n: int, k: int, batch: int, device: torch.device) -> None:
        self._kernel = RawKernel(glue(mode), device)
        self._n, self._k = n, k
        self._residual = torch.randn(batch, k, dtype=torch.float16, device=device)

    def __call__(self, y: Tensor, *, dependent: bool) -> Tensor:
        x = torch.empty(y.shape[0], self._k, dtype=y.dtype, device=y.device)
        grid = -(-x.numel() // (8 * _THREADS))
        arguments = (
            (y.data_ptr(), POINTER),
            (self._residual.data_ptr(), POINTER),
            (x.data_ptr(), POINTER),
            (y.shape[0], INT32),
            (self._k, INT32),
            (self._n, INT32),
        )
        self._kernel.launch(grid, _THREADS, arguments, dependent=dependent)
        return x


def chain(runs: list[Run], glues: list[Glue], depth: int, x: Tensor, *, dependent: bool) -> Tensor:
    """The activations [M, hidden] after ``depth`` layers."""
    with dependent_launches() if dependent else nullcontext():
        for layer in range(depth):
            for run, glue in zip(runs, glues, strict=True):
                x = glue(run(layer, x), dependent=dependent)
    return x


def main() -> int:
    arguments = _arguments()
    if not torch.cuda.is_available():
        print("error: the chain needs a GPU", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    layers = MODELS[arguments.model].layers(arguments.model)
    granularity = Granularity.from_group_size(arguments.group_size)
    weights = [
        random_weight(
            layer, granularity, asymmetric=False, dtype=torch.float16, device=device, weight_format=INT4
        )
        for layer in layers
    ]
    layer_bytes = sum(weight.nbytes for weight in weights)
    runs: dict[str, list[Run]] = {}
    contenders: list[Contender] = [Marlinq(), *(PEERS[name] for name in arguments.against)]
    for contender in contenders:
        reason = contender.unavailable(torch.float16, arguments.group_size, False)
        if reason is not None:
            print(f"{contender.name} was left out: {reason}", file=sys.stderr)
            continue
        runs[contender.name] = [
            contender.prepare(weight, arguments.layers, arguments.batch) for weight in weights
        ]
    found = []
    for batch in arguments.batch:
        found += _measure(runs, layers, batch, arguments.layers, layer_bytes, device)
    if arguments.json:
        print(json.dumps({"hardware": hardware_line(device), "layer_bytes": layer_bytes, "chains": found}))
    else:
        print(hardware_line(device))
        print(f"{arguments.layers} layers of {arguments.model}, {layer_bytes / 1e6:.1f} MB of weights each")
        for row in found:
            print(
                f"M={row['batch']:<3d} {row['chain']:<28s} {row['us_per_layer']:8.2f} us a layer"
                f"  {row['error']:.1e} from the ordinary chain"
            )
    return 0


def _measure(
    runs: dict[str, list[Run]],
    layers: tuple[LinearSize, ...],
    batch: int,
    depth: int,
    layer_bytes: int,
    device: torch.device,
) -> list[dict[str, object]]:
    following = [*layers[1:], layers[0]]
    glues = [
        Glue(mode, layer.n, after.k, batch, device)
        for mode, layer, after in zip(_MODES, layers, following, strict=True)
    ]
    start = torch.randn(batch, layers[0].k, dtype=torch.float16, device=device)
    # The glue alone shows what of the chain is not products.
    outputs = [torch.randn(batch, layer.n, dtype=torch.float16, device=device) for layer in layers]

    def given(out: Tensor) -> Run:
        return lambda copy, x: out

    alone = list(map(given, outputs))
    plans = {name: (steps, False) for name, steps in runs.items()}
    plans["marlinq, dependent launch"] = (runs["marlinq"], True)
    plans["element-wise kernels alone"] = (alone, False)
    results: dict[str, Tensor] = {}
    recordings = {}
    for name, (steps, dependent) in plans.items():
        forward = partial(chain, steps, glues, depth, start, dependent=dependent)
        forward()
        kept = torch.empty(batch, layers[0].k, dtype=torch.float16, device=device)
        results[name] = kept

        def launch(index: int, forward: Callable[[], Tensor] = forward, kept: Tensor = kept) -> None:
            kept.copy_(forward())

        recordings[name] = capture(launch, 1)
    # Many short sets of rounds: a median over them is not moved by one disturbed moment.
    times = [time_in_turn(recordings, 1.6e-3) for _ in range(5)]
    reference = results["marlinq"].float()
    rows: list[dict[str, object]] = []
    for name in plans:
        seconds = statistics.median(sample[name] for sample in times) / depth
        error = float((results[name].float() - reference).norm() / reference.norm())
        rows.append(
            {
                "batch": batch,
                "chain": name,
                "us_per_layer": 1e6 * seconds,
                "terabytes_per_second": layer_bytes / seconds / 1e12,
                "error": error,
            }
        )
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3-8b")
    parser.add_argument("--batch", type=int, action="append", default=None)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--against", action="append", choices=sorted(PEERS), default=None)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.batch = arguments.batch or [1, 16]
    arguments.against = ["cublas", "humming"] if arguments.against is None else arguments.against
    return arguments


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MarlinqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
