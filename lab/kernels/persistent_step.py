"""Check and time the persistent decode step of one row on the shape of Llama-3-8B, random weights.

python lab/kernels/persistent_step.py --context 128 --context 4096
python lab/kernels/persistent_step.py --check 0 --window 3

Times of one process repeat within 0.3 %, but those of two processes differ by up to 2.4 % (H200): they depend
on where the weights lie in memory. So compare two kernels on the same weights, or over several processes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from marlinq.core.errors import MarlinqError
from marlinq.core.granularity import Granularity
from marlinq.kernels.launch import persistent
from marlinq.kernels.launch.persistent import Model, PersistentLayers, StepConfig
from tests.kernels.persistent_problems import LLAMA_3_8B, Features, Reference, random_layer

_SHARED_BYTES = 232_448  # bytes of shared memory that a block of an H200 may have


class Setup:
    """Random layers, and the steps that run them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._sizes = LLAMA_3_8B
        self._model = Model(self._sizes.heads, self._sizes.kv_heads, 1e-5, self._sizes.head_dim**-0.5)
        features = Features(group=arguments.group_size)
        self._layers = [random_layer(self._sizes, features, 1, self._device) for _ in range(arguments.layers)]

    def _hidden(self) -> Tensor:
        """A random residual stream [1, H]."""
        return torch.randn(1, self._sizes.hidden, device=self._device).half()

    def _config(self) -> StepConfig:
        """The variant that the command line asks for."""
        arguments = self._arguments
        config = persistent.choose(
            [operand.channels for operand in self._layers[0].operands],
            self._model,
            self._sizes.head_dim,
            Granularity.group(arguments.group_size),
            zeros=False,
            bfloat16=False,
            shared_bytes=_SHARED_BYTES,
            team=arguments.team,
            teams=arguments.teams,
        )
        if config is None:
            raise SystemExit(f"no variant of {arguments.teams} teams fits")
        if arguments.window:
            config = replace(config, window=min(arguments.window, config.stages))
        return config

    def _step(self, hidden: Tensor, context: int, count: int) -> PersistentLayers:
        """``count`` layers as one launch."""
        lengths = torch.tensor([context], dtype=torch.int32, device=self._device)
        return PersistentLayers(self._layers[:count], self._model, hidden, lengths, config=self._config())

    def check(self, context: int) -> str:
        """The error of a few layers against float64, and whether launches give the same bits."""
        given = self._hidden()
        hidden = given.clone()
        count = min(self._arguments.check, len(self._layers))
        step = self._step(hidden, context, count)
        results = []
        for _ in range(5):
            hidden.copy_(given)
            step.launch()
            results.append(hidden.clone())
        expected = Reference(self._model, [context], torch.float16).step(self._layers[:count], given)
        error = float((results[0].double() - expected).norm() / expected.norm())
        same = all(torch.equal(results[0], other) for other in results)
        return f"error {error:.1e}, {'the same' if same else 'OTHER'} bits in {len(results)} launches"

    def time(self, context: int) -> str:
        """The median time of all layers."""
        given = self._hidden()
        hidden = given.clone()
        step = self._step(hidden, context, len(self._layers))

        def run() -> None:
            hidden.copy_(given)
            step.launch()

        took = median_of_replays(run) - median_of_replays(lambda: hidden.copy_(given))
        config = step.config
        return (
            f"{took:.1f} us, {took / len(self._layers):.2f} us a layer "
            f"({config.teams} teams, {config.stages} stages, window {config.window})"
        )


def median_of_replays(run: Callable[[], object], repeats: int = 40) -> float:
    """Median microseconds of a captured graph's replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def main() -> int:
    """Print two lines for each context."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--team", type=int, default=4, help="warps that share a stage")
    parser.add_argument("--teams", type=int, default=2)
    parser.add_argument("--window", type=int, help="stages in flight at most")
    parser.add_argument("--check", type=int, default=2, help="layers to check; 0: none")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the step needs a GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    setup = Setup(arguments)
    for context in arguments.context or [512]:
        if arguments.check:
            print(f"context={context} {setup.check(context)}", flush=True)
        print(f"context={context} {setup.time(context)}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MarlinqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
