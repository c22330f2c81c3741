"""Check and time the persistent decode step on the shape of Llama-3-8B, random weights.

    python lab/kernels/persistent_step.py --batch 1 --context 128 --context 4096
    python lab/kernels/persistent_step.py --check 0 --variant hollow --variant trace

Variants leave something out (``persistent_variants``), so their results are wrong: ``stream`` neither waits
for other blocks nor multiplies, ``exchange`` does not multiply, ``compute`` neither waits nor copies,
``latency`` does not copy, ``hollow`` neither copies nor multiplies. Those named trace also show when each
step of a layer is reached: cycles from the layer's start, median and most of all blocks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from marlinq.core.errors import MarlinqError
from marlinq.kernels.jit.cache import compile_missing
from marlinq.kernels.launch import persistent
from marlinq.kernels.launch.persistent import LayerOperands, Model, PersistentLayers, StepConfig
from tests.kernels.persistent_problems import LLAMA_3_8B, Features, Reference, random_layer

_VARIANTS = Path(__file__).parent.resolve() / "persistent_variants"


class Setup:
    """Layers, and the steps that run them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._sizes = LLAMA_3_8B
        self._model = Model(self._sizes.heads, self._sizes.kv_heads, 1e-5, self._sizes.head_dim**-0.5)
        self._features = Features(group=arguments.group_size)
        self._layers = [
            random_layer(self._sizes, self._features, max(arguments.batch), self._device)
            for _ in range(arguments.layers)
        ]

    def hidden(self, batch: int) -> Tensor:
        """A random residual stream."""
        return torch.randn(batch, self._sizes.hidden, device=self._device).half()

    def lengths(self, batch: int, context: int) -> list[int]:
        """Ragged, the longest first."""
        return [max(0, context - 37 * row) for row in range(batch)]

    def _of_rows(self, batch: int, count: int) -> list[LayerOperands]:
        return [
            replace(layer, keys=layer.keys[:batch], values=layer.values[:batch])
            for layer in self._layers[:count]
        ]

    def config(self, batch: int, variant: str | None) -> StepConfig:
        """Of a variant, ``name@window``."""
        arguments = self._arguments
        config = persistent.choose(
            [operand.channels for operand in self._layers[0].operands],
            batch,
            self._model,
            self._sizes.head_dim,
            arguments.group_size,
            zeros=False,
            bfloat16=False,
            shared_bytes=232_448,
            team=arguments.team,
            teams=arguments.teams,
        )
        if config is None:
            raise SystemExit(f"no variant of {batch} rows and {arguments.teams} teams fits")
        variant, _, window = (variant or "").partition("@")
        wanted = int(window) if window else arguments.window
        if wanted:
            config = replace(config, window=min(wanted, config.stages))
        if variant:
            config = replace(config, header=str(_VARIANTS / f"{variant}.cuh"))
        return config

    def build(self, hidden: Tensor, context: int, count: int, variant: str | None = None) -> PersistentLayers:
        """``count`` layers as one launch."""
        batch = hidden.shape[0]
        layers, config = self._of_rows(batch, count), self.config(batch, variant)
        lengths = torch.tensor(self.lengths(batch, context), dtype=torch.int32, device=self._device)
        return PersistentLayers(layers, self._model, hidden, lengths, config=config)

    def check(self, batch: int, context: int) -> str:
        """The error of a few layers against float64, and whether launches give the same bits."""
        given = self.hidden(batch)
        hidden = given.clone()
        count = min(self._arguments.check, len(self._layers))
        step = self.build(hidden, context, count)
        results = []
        for _ in range(5):
            hidden.copy_(given)
            step.launch()
            results.append(hidden.clone())
        layers = self._of_rows(batch, count)
        reference = Reference(self._model, self.lengths(batch, context), torch.float16)
        expected = reference.step(layers, given)
        error = float((results[0].double() - expected).norm() / expected.norm())
        same = all(torch.equal(results[0], other) for other in results)
        return f"error {error:.1e}, {'the same' if same else 'OTHER'} bits in {len(results)} launches"

    def time(self, batch: int, context: int, variant: str | None) -> str:
        """Median time, and what the trace shows."""
        given = self.hidden(batch)
        hidden = given.clone()
        step = self.build(hidden, context, len(self._layers), variant)

        def run() -> None:
            hidden.copy_(given)
            step.launch()

        took = median_of_replays(run) - median_of_replays(lambda: hidden.copy_(given))
        config = step.config
        text = (
            f"{variant or 'whole'}: {took:.1f} us, {took / len(self._layers):.2f} a layer "
            f"({config.teams} teams, {config.stages} stages, window {config.window})"
        )
        return text + (marks(step.trace.cpu()) if variant and "trace" in variant else "")


def marks(trace: Tensor) -> str:
    """Cycles from the start of the layer, by kind of warp and mark."""
    since = (trace - trace[:, :1, :1]).float()
    text = ""
    for kind in range(trace.shape[1]):
        text += f"\n  kind {kind}:"
        for mark in range(trace.shape[2]):
            seen = trace[:, kind, mark] != 0
            if seen.any():
                found = since[seen, kind, mark]
                text += f"  {mark}: {found.median():.0f}<{found.max():.0f}"
    return text


def median_of_replays(run: Callable[[], object], repeats: int = 40) -> float:
    """Microseconds of a captured graph."""
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
    """Print a line for every cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--context", type=int, action="append")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--team", type=int, default=4)
    parser.add_argument("--teams", type=int, default=2)
    parser.add_argument("--window", type=int, help="stages on their way at most")
    parser.add_argument("--check", type=int, default=2, help="layers to check; 0: none")
    parser.add_argument("--variant", action="append")
    arguments = parser.parse_args()
    arguments.batch = arguments.batch or [1]
    if not torch.cuda.is_available():
        print("error: the step needs a GPU", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    setup = Setup(arguments)
    for batch in arguments.batch:
        variants = [setup.config(batch, variant).instantiation for variant in arguments.variant or [None]]
        compile_missing("sm_90a", variants)
        for context in arguments.context or [512]:
            if arguments.check and not arguments.variant:
                print(f"M={batch} context={context} {setup.check(batch, context)}", flush=True)
            for variant in arguments.variant or [None]:
                print(f"M={batch} context={context} {setup.time(batch, context, variant)}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MarlinqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
