"""Tables and plots of the documentation, made from the result files in docs/results.

    python -m lab.figures          # rewrite docs/plots/*.svg and the tables between markers in the pages
    python -m lab.figures --check  # exit with 1 where a page or plot is stale

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. Plots are SVG with their own
style sheet, so that they follow the reader's light or dark setting.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from marlinq.operations.bench.serve_plot import steps_plot

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "results.md", DOCS.parent / "README.md")
PLOTS = DOCS / "plots"
_OURS = "marlinq"
_SHOWN_BATCHES = (1, 16, 64, 256, 1024, 4096)
"""Batches of the tables of products; result files have more."""
_SHOWN_EXPERT_BATCHES = (1, 16, 64, 1024, 16384)
_SHOWN_SCHEMES = ("INT8, 64", "FP8", "NVFP4", "INT4, 32", "MXFP4", "INT4, 64")
_PEER = "AutoRound"
_STRONG_PEER = "AutoRound, 1,000 iterations, alg_ext, all its text"
_COMPARED = (
    ("default", _PEER, ""),
    ("best", _PEER, ", `best`"),
    ("best, documents", _PEER, ", `best --no-tune-own-text`"),
)
"""rows of the table of divergences: (recipe, peer that it is divided by, what the row's name adds)"""
READ_BYTES_PER_SECOND = 4.58e12
"""Bandwidth of a kernel that only reads device memory on an H200."""

_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 15px } .small { font-size: 11px; fill: #57606a }
  .grid { stroke: #d0d7de } .axis { stroke: #57606a }
  .ours { stroke: #0969da; fill: #0969da } .first { stroke: #bc4c00; fill: #bc4c00 }
  .second { stroke: #6e7781; fill: #6e7781 }
  polyline { fill: none !important; stroke-width: 2.5 } .label { stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .grid { stroke: #30363d } .axis { stroke: #9198a1 }
    .ours { stroke: #58a6ff; fill: #58a6ff } .first { stroke: #f0883e; fill: #f0883e }
    .second { stroke: #9198a1; fill: #9198a1 }
  }
"""


def result(name: str) -> dict[str, Any]:
    """One result file."""
    value: dict[str, Any] = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return value


def over_floor(found: dict[str, Any]) -> dict[str, list[float]]:
    """Time over floor, geometric mean over the layers, by contender.

    The floor of a cell is the larger of a cold read of the weight's bytes and 2 M N K at the measured peak.
    """
    means: dict[str, list[float]] = {}
    contenders = list(next(iter(found["microseconds"].values())))
    for contender in contenders:
        means[contender] = []
        for place, m in enumerate(found["batches"]):
            logarithms = []
            for layer, (n, k) in found["shapes"].items():
                arithmetic = 2 * m * n * k / (found["peak_tflops"] * 1e6)
                floor = max(found["cold_read_us"][layer], arithmetic)
                logarithms.append(math.log(found["microseconds"][layer][contender][place] / floor))
            means[contender].append(math.exp(sum(logarithms) / len(logarithms)))
    return means


def speed_plot() -> str:
    """Time over floor by batch without rests, both axes logarithmic."""
    found = result("kernels-sustained-h200")
    means = {name.partition(" (")[0]: values for name, values in found["ratios"].items()}
    batches = found["batches"]
    left, top, width, height = 60, 84, 560, 300

    def x(m: float) -> float:
        return left + width * math.log(m / batches[0]) / math.log(batches[-1] / batches[0])

    def y(ratio: float) -> float:
        return top + height * (1 - math.log(ratio / 0.9) / math.log(4.4 / 0.9))

    parts = [
        _text("title", 26, "4-bit matrix product, time over the hardware floor (lower is better)"),
        _text("small", 46, f"{found['hardware']}, eight Llama-3 layers, geometric mean, without rests;"),
        _text("small", 62, _versions(found)),
    ]
    parts += [
        f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y(ratio):.1f}" y2="{y(ratio):.1f}"/>'
        f'<text x="{left - 10}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:g}x</text>'
        for ratio in (1, 1.5, 2, 3, 4)
    ]
    parts += [
        f'<text x="{x(m):.1f}" y="{top + height + 20}" text-anchor="middle">{m}</text>' for m in batches
    ]
    middle = left + width / 2
    parts.append(
        f'<text x="{middle}" y="{top + height + 44}" text-anchor="middle">batch (rows of activations)</text>'
    )
    # Labels stand at the left end, where the curves are at least a line of text apart.
    for kind, contender in zip(("ours", "first", *["second"] * len(means)), means, strict=False):
        points = " ".join(f"{x(m):.1f},{y(r):.1f}" for m, r in zip(batches, means[contender], strict=True))
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
        at = y(means[contender][0]) - 8
        parts.append(f'<text class="{kind} label" x="{x(1.15):.1f}" y="{at:.1f}">{contender}</text>')
    return _svg(680, top + height + 62, parts)


def quality_plot() -> str:
    """Mean KL divergence from the original, one bar a method."""
    found = result("quality-smollm2")
    rows = sorted(found["rows"], key=lambda row: row["kl"])
    left, top, step, width = 410, 78, 30, 300
    longest = max(row["kl"] for row in rows)
    parts = [
        _text("title", 26, "What 4 bits cost: mean KL divergence from the original (lower is better)"),
        _text("small", 46, "SmolLM2-135M-Instruct, symmetric, groups of 64, the same 64 documents of C4;"),
        _text("small", 62, _versions(found)),
    ]
    for index, row in enumerate(rows):
        y = top + index * step
        kind = "ours" if row["package"] == _OURS else "second"
        name = f"{row['package']}: {row['method']}".replace("`", "").replace('"', "")
        long = width * row["kl"] / longest
        parts.append(
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{_escaped(name)}</text>'
            f'<rect class="{kind}" x="{left}" y="{y}" width="{long:.1f}" height="20" rx="2"/>'
            f'<text x="{left + long + 8:.1f}" y="{y + 15}">{row["kl"]:.4f}</text>'
        )
    return _svg(780, top + len(rows) * step + 10, parts)


def serve_plot() -> str:
    """Tokens per second of each sequence in vLLM by batch, with its own kernels and with marlinq's."""
    found = result("decode-plugin-h200")
    steps = {
        name: {str(batch): 1e-3 * value for batch, value in zip(found["batches"], values, strict=True)}
        for name, values in found["rows"].items()
    }
    return steps_plot(steps, (found["shown"], f"{found['hardware']}; vLLM {found['versions']['vLLM']}"))


def _text(kind: str, y: int, words: str) -> str:
    return f'<text class="{kind}" x="20" y="{y}">{_escaped(words)}</text>'


def _versions(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found["versions"].items())


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n<style>{_STYLE}</style>\n{body}\n</svg>\n'
    )


def _shown(found: dict[str, Any]) -> list[int]:
    """Places of the batches that tables show."""
    return [place for place, batch in enumerate(found["batches"]) if batch in _SHOWN_BATCHES]


def _over_best_peer(times: dict[str, list[float]], place: int) -> float:
    """Our time over the faster peer's at one batch."""
    return times[_OURS][place] / min(values[place] for name, values in times.items() if name != _OURS)


def sustained_table() -> str:
    """Time over floor by contender and batch, replays back to back."""
    found = result("kernels-sustained-h200")
    rows = [["time over floor", *(str(found["batches"][place]) for place in _shown(found))]]
    rows += [
        [name, *(f"{values[place]:.2f}" for place in _shown(found))]
        for name, values in found["ratios"].items()
    ]
    return _table(rows)


def floors_table() -> str:
    """Time over floor by contender and batch, and ours over the best peer's in the best and worst layer."""
    found = result("kernels-h200")
    places = _shown(found)
    rows = [["time over floor", *(str(found["batches"][place]) for place in places)]]
    rows += [
        [name, *(f"{values[place]:.2f}" for place in places)] for name, values in over_floor(found).items()
    ]
    layers = found["microseconds"].values()
    for word, extreme in (("best", min), ("worst", max)):
        cells = (f"{extreme(_over_best_peer(times, place) for times in layers):.2f}" for place in places)
        rows.append([f"marlinq over the best peer, {word} layer", *cells])
    return _table(rows)


def elements_table() -> str:
    """Times of one model's layers by kind of weight and batch, beside cuBLAS and, where measured, Humming."""
    measured = result("elements-h200")
    rows = [["us; over cuBLAS FP16; over Humming", *map(str, measured["batches"])]]
    for row in measured["rows"]:
        peers = [row[name] for name in ("cublas", "humming") if name in row]
        cells = zip(row["marlinq"], *peers, strict=True)
        rows.append(
            [row["weights"]]
            + [
                "; ".join([f"{ours:.1f}", *(f"{ours / peer:.2f}" for peer in beside)])
                for ours, *beside in cells
            ]
        )
    return _table(rows)


def elements_experts_table() -> str:
    """Times of one routed layer by kind of weight and batch, beside the floor of its bytes and Humming's."""
    measured = result("elements-h200")["experts"]
    rows = [["us; over the floor; over Humming", *map(str, measured["batches"])]]
    for name, row in measured["rows"].items():
        cells = [f"{us:.1f}; {us / floor:.2f}" for us, floor in zip(row["us"], row["floor"], strict=True)]
        peer = [f"; {ratio:.2f}" for ratio in row["over_humming"]]
        rows.append([name, *map("".join, zip_longest(cells, peer, fillvalue=""))])
    return _table(rows)


def elements_steps_table() -> str:
    """Decode steps by kind of weight and batch."""
    measured = result("elements-h200")["steps"]
    rows = [["ms", *(f"batch {batch}" for batch in measured["batches"])]]
    for name, row in measured["rows"].items():
        rows.append([name, *("-" if ms is None else f"{ms:.2f}" for ms in row)])
    return _table(rows)


def experts_table() -> str:
    """Times of whole routed layers by model and batch, beside Humming's and the hardware's limit."""
    found = result("experts-h200")
    places = [place for place, batch in enumerate(found["batches"]) if batch in _SHOWN_EXPERT_BATCHES]
    rows = [["us; over Humming; over the floor", *(str(found["batches"][place]) for place in places)]]
    for layer, cell in found["layers"].items():
        ours, humming, floor = (
            [cell[name][place] for place in places] for name in ("marlinq", "humming", "floor")
        )
        cells = zip(ours, humming, floor, strict=True)
        rows.append(
            [layer, *(f"{a:.{0 if a >= 1000 else 1}f}; {a / b:.2f}; {a / c:.2f}" for a, b, c in cells)]
        )
    return _table(rows)


def quality_table() -> str:
    """Perplexity, KL divergence and top-1 agreement by package and method."""
    found = result("quality-smollm2")
    rows = [["package: method", "perplexity", "mean KL (nats)", "top-1 agreement (%)"]]
    rows.append(["original, float32", f"{found['original_perplexity']:.3f}", "", ""])
    rows += [
        [
            _named(row),
            f"{row['perplexity']:.3f}" if "perplexity" in row else "",
            f"{row['kl']:.4f}",
            f"{row['top1']:.1f}",
        ]
        for row in found["rows"]
    ]
    return _table(rows)


def _named(row: dict[str, Any]) -> str:
    """Package and method."""
    return f"{row['package']}: {row['method']}"


def quality_schemes_table() -> str:
    """KL divergence of one model by type of weights, a column each."""
    rows = [row for row in result("quality-schemes-h200")["rows"] if row["weights"] in _SHOWN_SCHEMES]
    table = [["", *(row["weights"] for row in rows)]]
    for title, key in (("novels", "novels"), ("C4", "c4")):
        table.append([title, *(f"{row[key]:.4f}" for row in rows)])
    return _table(table)


def quality_worst_table() -> str:
    """KL divergence of ``default`` over AutoRound's on five kinds of text, by model."""
    found = result("quality-worst-h200")
    rows = [["KL over AutoRound's", *found["texts"]]]
    for run in found["runs"]:
        name = f"{run['model']}, {run['group_size']}{', scaled' if run['scaled'] else ''}"
        for ours, peer, suffix in _COMPARED:
            if ours in run["rows"] and peer in run["rows"]:
                mine, theirs = (run["rows"][row]["kl"] for row in (ours, peer))
                cells = (f"{a / b:.2f}" for a, b in zip(mine, theirs, strict=True))
                rows.append([name + suffix, *cells])
    return _table(rows)


def quality_ratios_table() -> str:
    """Smallest and largest ratio to AutoRound's divergence by model."""
    runs = result("quality-worst-h200")["runs"]
    rows = [["KL divergence over AutoRound's, least to largest of the texts", "`default`", "`best`"]]
    for model in dict.fromkeys(run["model"] for run in runs):
        of_model = [run for run in runs if run["model"] == model and not run["scaled"]]
        sizes = " and ".join(map(str, sorted({run["group_size"] for run in of_model})))
        rows += _spans(f"{model}, groups of {sizes}", of_model)
    rows += _spans("SmolLM2 and Qwen, channels scaled", [run for run in runs if run["scaled"]])
    return _table(rows)


def _spans(name: str, runs: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of ratios to AutoRound with 200 iterations, and in bold to its strongest setting."""
    plain = [_span(runs, ours, _PEER) for ours in ("default", "best")]
    strong = [f"**{_span(runs, ours, _STRONG_PEER)}**" for ours in ("default", "best")]
    return [[name, *plain], ["the same, over AutoRound's strongest setting", *strong]]


def _span(runs: Iterable[dict[str, Any]], ours: str, peer: str) -> str:
    """Smallest and largest divergence of ``ours`` over the peer's on a text."""
    ratios = [
        a / b
        for rows in (run["rows"] for run in runs)
        for a, b in zip(rows[ours]["kl"], rows[peer]["kl"], strict=True)
    ]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def quality_sparse_table() -> str:
    """KL divergence of dense and 2:4 sparse weights by model, the mean of five texts."""
    models = result("quality-sparse-h200")["models"]
    rows = [["mean of five texts", *(row["weights"] for row in models[0]["rows"])]]
    for model in models:
        cells = (f"{fmean(row['kl']):.3f}" for row in model["rows"])
        rows.append([f"{model['name']}, {model['group_size']}", *cells])
    return _table(rows)


def head_table() -> str:
    """KL divergence by bits of blocks (rows) and output head (columns)."""
    found = result("head-smollm2")["rows"]
    heads = {"none": "16-bit head", "int8": "8-bit head", "int4": "4-bit head"}
    divergences = {(row["blocks"], row["head"]): row.get("kl", 0.0) for row in found}
    rows = [["KL", *heads.values()]]
    rows += [
        [f"{blocks} blocks", *(f"{divergences[blocks, head]:.4f}" for head in heads)]
        for blocks in dict.fromkeys(row["blocks"] for row in found)
    ]
    return _table(rows)


def decode_table() -> str:
    """Decode steps by batch (rows) and context (columns)."""
    cells = {
        (cell["batch"], cell["context"]): f"{1e3 * cell['first_token_seconds']:.1f}; "
        f"{1e3 * cell['step_seconds']:.3f}; {cell['bandwidth'] / 1e9:,.0f}"
        for cell in result("decode-h200")["cells"]
    }
    contexts = sorted({context for _, context in cells})
    rows = [["first token (ms); step (ms); GB/s", *(f"context {context}" for context in contexts)]]
    rows += [
        [f"batch {batch}", *(cells.get((batch, context), "-") for context in contexts)]
        for batch in dict.fromkeys(batch for batch, _ in cells)
    ]
    return _table(rows)


def plugin_table() -> str:
    """Decode steps of vLLM with its own kernels and with ours."""
    found = result("decode-plugin-h200")
    own, plugin = found["rows"].values()
    rows = [["ms a step", *(f"batch {batch}" for batch in found["batches"])]]
    rows += [[name, *(f"{value:.2f}" for value in values)] for name, values in found["rows"].items()]
    rows.append(["ratio", *(f"{ours / theirs:.2f}" for theirs, ours in zip(own, plugin, strict=True))])
    return _table(rows)


def plugin_requests_table() -> str:
    """Time to first tokens, throughput and start-up of vLLM with its own kernels and with marlinq's."""
    found = result("decode-plugin-h200")
    rows = [
        [
            "",
            "first token, 1 prompt (ms)",
            "8 prompts (ms)",
            "256 requests (tokens/s)",
            "start: warm, cold (s)",
        ]
    ]
    for name, times in found["first_token_ms"].items():
        rate = found["tokens_per_second"][name]
        starts = ", ".join(f"{found[kind][name]:.1f}" for kind in ("start_seconds", "start_seconds_cold"))
        rows.append([name, *(f"{ms:.1f}" for ms in times.values()), f"{rate:,}", starts])
    return _table(rows)


def plugin_mixture_table() -> str:
    """Decode steps of a mixture in vLLM on one and two GPUs, without and with marlinq's kernels."""
    found = result("decode-plugin-h200")
    one, two = found["mixture"], found["two_gpus"]["rows"]
    rows = [["ms a step, without and with", *(f"batch {batch}" for batch in one["batches"])]]
    for name, pair in (
        ("one GPU", one["rows"].values()),
        *(
            (f"two, {split}", [two[name] for name in two if name.startswith(split)])
            for split in ("by experts", "by tensors")
        ),
    ):
        without, plugin = pair
        rows.append([name, *(f"{a:.2f}, {b:.2f}" for a, b in zip(without, plugin, strict=True))])
    return _table(rows)


def shapes_table() -> str:
    """A step of one sequence by model shape, beside a plain read of the step's bytes."""
    rows = [["shape", "step (ms)", "over a plain read of its bytes"]]
    for found in result("decode-shapes-h200")["shapes"]:
        (cell,) = found["cells"]
        read = cell["step_bytes"] / READ_BYTES_PER_SECOND
        rows.append(
            [
                found["checkpoint"].split()[1].rstrip(","),
                f"{1e3 * cell['step_seconds']:.3f}",
                f"{cell['step_seconds'] / read:.2f}",
            ]
        )
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


TABLES: dict[str, Callable[[], str]] = {
    "floors": floors_table,
    "elements": elements_table,
    "elements-experts": elements_experts_table,
    "elements-steps": elements_steps_table,
    "sustained": sustained_table,
    "experts": experts_table,
    "quality": quality_table,
    "quality-schemes": quality_schemes_table,
    "quality-worst": quality_worst_table,
    "quality-ratios": quality_ratios_table,
    "quality-sparse": quality_sparse_table,
    "head": head_table,
    "decode": decode_table,
    "plugin": plugin_table,
    "plugin-requests": plugin_requests_table,
    "plugin-mixture": plugin_mixture_table,
    "shapes": shapes_table,
}
DRAWINGS: dict[str, Callable[[], str]] = {
    "speed.svg": speed_plot,
    "serve.svg": serve_plot,
    "quality.svg": quality_plot,
}


def wanted() -> dict[Path, str]:
    """Every file that this script writes, as it should be."""
    files = {PLOTS / name: draw() for name, draw in DRAWINGS.items()}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, table in TABLES.items():
            # Table lines only: a marker without its end must not swallow what follows.
            marker = re.compile(rf"(<!-- table: {name} -->\n)(?:\|.*\n)*(<!-- end -->)")
            text = marker.sub(lambda found, made=table: f"{found[1]}{made()}\n{found[2]}", text)  # type: ignore[misc]
        files[page] = text
    return files


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    stale = [path for path, text in wanted().items() if not path.exists() or path.read_text("utf-8") != text]
    if parser.parse_args().check:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is stale; run: python -m lab.figures", file=sys.stderr)
        sys.exit(bool(stale))
    PLOTS.mkdir(exist_ok=True)
    for path, text in wanted().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
