"""Does ``marlinq verify`` suspect anything in weights that are right?

    python -m lab.reliability.false_alarms MODEL TEXT... [--blocks 4] [--tokens 8192]

Layers are quantised with GPTQ and judged by the statistics of ``verify --against``, at groups of 32, 64, 128
and whole channels, with and without zero points. They are those of

* MODEL (an unquantised checkpoint with Llama's module names), with the inputs that TEXT gives them;
* wider models made of MODEL's blocks side by side, weights and inputs alike: a width of 640 with weights
  rounded to BF16, and one of 896 with an MLP of 4864;
* synthetic layers whose inputs a few channels dominate.

Each layer is judged as if it were a whole checkpoint, which is the strictest: thresholds rise with a run.
Layouts take turns, two for each result. The table is Markdown. The exit code is 1 if anything was suspected.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import INT4, Scheme
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import LAYOUTS, Layout, spec_of
from marlinq.methods.gptq import GPTQOptions, solve_gptq
from marlinq.operations.verify.statistics.evidence import Evidence, find_faults
from marlinq.operations.verify.statistics.finding import RunSize
from tests.testing.realistic_layers import realistic_layer

GROUPS = (32, 64, 128, -1)
MODULES = {
    "self_attn.q_proj": "attention",
    "self_attn.k_proj": "attention",
    "self_attn.v_proj": "attention",
    "self_attn.o_proj": "output",
    "mlp.gate_proj": "mlp",
    "mlp.up_proj": "mlp",
    "mlp.down_proj": "down",
}
"""The linears of a block, and which of them read the same input."""


@dataclass(frozen=True)
class LinearLayer:
    """One linear: a weight, float32 [N, K], and the Hessian of its inputs, float32 [K, K]."""

    model: str
    name: str
    weight: Tensor
    hessian: Tensor


@dataclass
class Row:
    """Findings in one cell of the table."""

    layers: int = 0
    words: int = 0
    groups: int = 0
    warnings: int = 0
    failures: int = 0
    odd_groups: int = 0
    largest: float = 0.0
    widest: float = 0.0
    seen: list[str] = field(default_factory=list)

    def add(self, name: str, evidence: Evidence) -> None:
        """Count one layer."""
        self.layers += 1
        self.words += evidence.words
        self.groups += evidence.groups
        self.odd_groups += evidence.odd_groups
        self.largest = max(self.largest, evidence.largest)
        self.widest = max(self.widest, evidence.spread)
        for finding in evidence.findings:
            self.failures += finding.fails
            self.warnings += not finding.fails
            self.seen.append(
                f"{name}: {finding.what} ({finding.evidence:.0f}, expected {finding.expected:.1e})"
            )


def judge(weight: Tensor, q: QuantizedWeight, layout: Layout) -> Evidence:
    """The evidence against one layer, as a run of its own."""
    stored = layout.pack(q)
    spec = replace(spec_of(q), scheme=layout.as_stored(replace(q.scheme, scale_dtype="float16")))
    found = layout.unpack(stored, spec)
    return find_faults(weight, found, layout, spec, stored, RunSize.of([spec]))


class Source:
    """Weights and inputs of some blocks of a model."""

    def __init__(self, path: Path, text: str, blocks: int, tokens: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        layers = model.model.layers
        self.blocks = torch.linspace(0, len(layers) - 1, blocks).round().int().tolist()
        self._inputs: dict[tuple[int, str], list[Tensor]] = {}
        self._weights: dict[tuple[int, str], Tensor] = {}
        for block in self.blocks:
            for name, reads in MODULES.items():
                linear = layers[block].get_submodule(name)
                self._weights[block, name] = linear.weight.detach()
                if (block, reads) not in self._inputs:
                    self._inputs[block, reads] = []
                    linear.register_forward_pre_hook(self._tap(block, reads))
        ids = tokenizer(text, return_tensors="pt").input_ids[0][:tokens]
        with torch.no_grad():
            for part in ids.split(512):
                model.model(part.unsqueeze(0))

    def _tap(self, block: int, reads: str) -> Callable[[object, tuple[Tensor, ...]], None]:
        def keep(_: object, inputs: tuple[Tensor, ...]) -> None:
            self._inputs[block, reads].append(inputs[0].detach().flatten(0, -2).half())

        return keep

    def layer(self, model: str, block: int, name: str, k: int = 0, n: int = 0) -> LinearLayer:
        """The linear of a block, or one of K = ``k`` and N = ``n`` made of it and the blocks after it."""
        start = self.blocks.index(block)
        order = self.blocks[start:] + self.blocks[:start]
        own = self._weights[block, name].shape
        k, n = k or own[1], n or own[0]
        wide, high = -(-k // own[1]), -(-n // own[0])
        x = torch.cat(
            [torch.cat(self._inputs[order[i % len(order)], MODULES[name]]) for i in range(wide)], dim=1
        ).float()[:, :k]
        rows = [
            torch.cat(
                [self._weights[order[(row + column) % len(order)], name] for column in range(wide)], dim=1
            )
            for row in range(high)
        ]
        weight = torch.cat(rows)[:n, :k]
        return LinearLayer(model, f"block {block} {name} {k} x {n}", weight, 2 * x.t() @ x / len(x))


def layers_of(source: Source) -> Iterator[LinearLayer]:
    """Every layer of the campaign."""
    for block in source.blocks[::3]:
        for name, k, n in (
            ("self_attn.q_proj", 640, 1024),
            ("self_attn.o_proj", 1024, 640),
            ("mlp.up_proj", 640, 2048),
            ("mlp.down_proj", 2048, 640),
        ):
            layer = source.layer("640 / 2048, BF16", block, name, k, n)
            yield replace(layer, weight=layer.weight.bfloat16().float())
    for block in source.blocks:
        for name in MODULES:
            yield source.layer("the model", block, name)
    for seed, (k, n) in enumerate([(1024, 640), (1024, 640), (768, 2048), (2048, 512)]):
        weight, hessian = realistic_layer(k, n, seed, dominant=(0, 1, 2, 8)[seed])
        yield LinearLayer("synthetic", f"seed {seed} {k} x {n}", weight, hessian)
    first, last = source.blocks[0], source.blocks[-2]
    for block, name, k, n in (
        (first, "self_attn.q_proj", 896, 896),
        (first, "self_attn.k_proj", 896, 128),
        (last, "self_attn.o_proj", 896, 896),
        (last, "mlp.up_proj", 896, 4864),
        (last, "mlp.down_proj", 4864, 896),
    ):
        yield source.layer("896 / 4864", block, name, k, n)


def measure(
    layer: LinearLayer, table: dict[tuple[str, str, int, bool], Row], turn: int, layouts: int
) -> None:
    """Quantise one layer in every way, and judge each result in ``layouts`` layouts, which take turns."""
    k = layer.weight.shape[1]
    ways = [(group_size, symmetric, "static") for group_size in GROUPS for symmetric in (True, False)]
    for group_size, symmetric, act_order in [*ways, (64, True, "none")]:
        if group_size != -1 and k % group_size:
            continue
        granularity = Granularity.from_group_size(group_size)
        scheme = Scheme(INT4, granularity, "midpoint" if symmetric else "stored")
        q, _ = solve_gptq(layer.weight, layer.hessian, scheme, GPTQOptions(act_order=act_order))
        able = [name for name, layout in LAYOUTS.items() if layout.refusal(q) is None]
        turn += 1
        for name in sorted({able[(turn * layouts + step) % len(able)] for step in range(layouts)}):
            row = table.setdefault((layer.model, name, group_size, symmetric), Row())
            row.add(layer.name, judge(layer.weight, q, LAYOUTS[name]))


def measure_all(source: Source, table: dict[tuple[str, str, int, bool], Row], layouts: int) -> None:
    """Every layer, with a line on the standard error for each."""
    started = time.monotonic()
    for turn, layer in enumerate(layers_of(source)):
        measure(layer, table, turn, layouts)
        seen = sum(len(row.seen) for row in table.values())
        print(
            f"{time.monotonic() - started:6.0f} s  {layer.model}: {layer.name}; {seen} suspected so far",
            file=sys.stderr,
        )


def print_table(table: dict[tuple[str, str, int, bool], Row]) -> None:
    """One line a model, layout, group size and kind of zero points."""
    columns = ["model", "layout", "group", "zero points", "runs", "words", "groups", "largest L"]
    columns += ["widest tail", "odd groups", "warnings", "failures"]
    print("| " + " | ".join(columns) + " |")
    print("| --- | --- " + "| ---: " * (len(columns) - 2) + "|")
    for (model, layout, group_size, symmetric), row in sorted(table.items()):
        kind = "none" if symmetric else "stored"
        print(
            f"| {model} | {layout} | {group_size} | {kind} | {row.layers} | {row.words} | {row.groups} | "
            f"{row.largest:.1f} | {row.widest:.2f} | {row.odd_groups} | {row.warnings} | {row.failures} |"
        )


def main() -> int:
    """Print the table."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    text = "\n".join(path.read_text() for path in arguments.text)
    source = Source(arguments.model, text, arguments.blocks, arguments.tokens)
    table: dict[tuple[str, str, int, bool], Row] = {}
    # Ctrl-C ends it with what there is.
    with suppress(KeyboardInterrupt):
        measure_all(source, table, arguments.layouts)
    print_table(table)
    rows = table.values()
    warnings, failures = sum(row.warnings for row in rows), sum(row.failures for row in rows)
    print(
        f"\n{sum(row.layers for row in rows)} runs, {sum(row.words for row in rows)} words, "
        f"{sum(row.groups for row in rows)} groups: {warnings} warnings, {failures} failures; "
        f"largest L {max(row.largest for row in rows):.1f}"
    )
    for row in rows:
        print("".join(f"{seen}\n" for seen in row.seen), end="")
    return 1 if warnings or failures else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path, nargs="+", help="plain text files that the model reads")
    parser.add_argument("--blocks", type=int, default=4, help="how many blocks, spread over the model")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layouts", type=int, default=2, help="in how many layouts each result is judged")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
