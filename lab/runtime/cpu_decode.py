"""Decode steps on a CPU: the original and the quantised model, each run exactly and at its fastest.

    OMP_WAIT_POLICY=passive python lab/runtime/cpu_decode.py quickstart/model quickstart/marlin --context 64

The four models take turns in one process, a few steps each, so that whatever else runs on the machine meets
all of them. The wait policy is what the command line sets. Median and least of the rounds' median steps;
tokens/s and the gain are of the medians. With ``--profile`` the parts of a step of the first and the last
follow, with ``--text`` what rounding to BF16 changes on 8 windows of 256 tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from marlinq.operations.bench.hardware import hardware_line
from marlinq.operations.evaluate import evaluate
from marlinq.runtime import LoadedModel, load
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.forward_choice import choose_forward

_PROFILED_STEPS = 10
_PROFILED_ROWS = 12


@dataclass
class Contestant:
    """A model in the middle of decoding, and the median step of each of its rounds in seconds."""

    name: str
    loaded: LoadedModel
    forward: Forward
    tokens: Tensor
    rounds: list[float] = field(default_factory=list)

    def run(self, steps: int) -> list[float]:
        """Seconds of each of ``steps`` more steps."""
        found = []
        for _ in range(steps):
            start = time.perf_counter()
            self.tokens = self.forward.step(self.tokens).argmax(-1)
            found.append(time.perf_counter() - start)
        return found

    def rewind(self, prompt: Tensor) -> None:
        """Start over after ``prompt``, so that every round has the same context."""
        lengths = torch.tensor([prompt.shape[1]], dtype=torch.int32)
        self.tokens = self.forward.prefill(prompt, lengths).argmax(-1)


def contestant(name: str, folder: Path, exact: bool, prompt: Tensor, steps: int) -> Contestant:
    """``folder``, loaded, with room for ``prompt`` and ``steps``."""
    loaded = load(folder, device="cpu", exact=exact)
    forward = choose_forward(loaded, 1, prompt.shape[1] + steps)
    return Contestant(name, loaded, forward, prompt[:, 0])


def print_profile(found: Contestant) -> None:
    """The operations of torch that take most of a step."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        found.run(_PROFILED_STEPS)
    events = sorted(recorded.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    print(f"\n{found.name}: {total / _PROFILED_STEPS / 1e3:.2f} ms in torch's operations a step")
    for event in events[:_PROFILED_ROWS]:
        share = event.self_cpu_time_total / total
        milliseconds = event.self_cpu_time_total / _PROFILED_STEPS / 1e3
        print(f"{share:>7.1%}  {milliseconds:>8.3f} ms  {event.count // _PROFILED_STEPS:>5} x  {event.key}")


def print_divergences(contestants: Sequence[Contestant], text: str) -> None:
    """Mean KL and top-1 agreement of the 4-bit models with each other and with the original."""
    original, _, exact, packed = (found.loaded for found in contestants)
    print()
    for name, model, against in (
        ("packed against dequantised", packed, exact),
        ("dequantised against the original", exact, original),
        ("packed against the original", packed, original),
    ):
        found = evaluate(model, against=against, text=text, windows=8, length=256)
        print(f"{name:<36}KL {found.kl:.6f}   top-1 {found.top1_agreement:.2%}")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("original", type=Path)
    parser.add_argument("quantised", type=Path)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--text")
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(1000, (1, arguments.context), generator=generator)
    contestants = [
        contestant(name, folder, exact, prompt, arguments.steps + _PROFILED_STEPS)
        for name, folder, exact in (
            ("original, torch's float32", arguments.original, True),
            ("original, packed head", arguments.original, False),
            ("quantised, dequantised", arguments.quantised, True),
            ("quantised, packed", arguments.quantised, False),
        )
    ]
    for _ in range(arguments.rounds):
        for found in contestants:
            found.rewind(prompt)
            found.rounds.append(statistics.median(found.run(arguments.steps)))
    print(hardware_line(torch.device("cpu")))
    print(f"load average {os.getloadavg()[0]:.1f}, {arguments.context} tokens of context\n")
    print(f"{'':<28}{'median':>10}{'least':>10}{'tokens/s':>10}{'gain':>7}")
    first = statistics.median(contestants[0].rounds)
    for found in contestants:
        median, least = statistics.median(found.rounds), min(found.rounds)
        print(
            f"{found.name:<28}{1e3 * median:>7.2f} ms{1e3 * least:>7.2f} ms"
            f"{1 / median:>10.1f}{first / median:>7.2f}"
        )
    print()
    print("\n".join(contestants[-1].loaded.report()))
    if arguments.profile:
        print_profile(contestants[0])
        print_profile(contestants[-1])
    if arguments.text:
        print_divergences(contestants, arguments.text)


if __name__ == "__main__":
    main()
