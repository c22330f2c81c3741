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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marlinq.operations.bench.serve_plot import steps_plot

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "results.md", DOCS.parent / "README.md")
PLOTS = DOCS / "plots"
_OURS = "marlinq"
_BATCHES_BY_LAYER = (1, 16, 64, 256, 1024, 4096)
READ_BYTES_PER_SECOND = 4.58e12
"""What a kernel that only reads device memory reaches on an H200."""

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
    """Time over floor by batch, both axes logarithmic."""
    found = result("kernels-h200")
    means = over_floor(found)
    batches = found["batches"]
    left, top, width, height = 60, 84, 560, 300

    def x(m: float) -> float:
        return left + width * math.log(m / batches[0]) / math.log(batches[-1] / batches[0])

    def y(ratio: float) -> float:
        return top + height * (1 - math.log(ratio / 0.9) / math.log(4.4 / 0.9))

    parts = [
        _text("title", 26, "4-bit matrix product, time over the hardware floor (lower is better)"),
        _text("small", 46, f"{found['hardware']}, eight Llama-3 layers, geometric mean;"),
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
    for kind, contender in zip(("ours", "first", "second"), means, strict=False):
        points = " ".join(f"{x(m):.1f},{y(r):.1f}" for m, r in zip(batches, means[contender], strict=True))
        parts.append(f'<polyline class="{kind}" points="{points}"/>')
        name = f"{contender} {found['versions'][contender]}" if contender == "Humming" else contender
        at = y(means[contender][0]) - 8
        parts.append(f'<text class="{kind} label" x="{x(1.15):.1f}" y="{at:.1f}">{name}</text>')
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


def kernels_table() -> str:
    """Microseconds of our kernels by layer at every other batch, and their ratio to the faster peer's."""
    found = result("kernels-h200")
    shown = [place for place, batch in enumerate(found["batches"]) if batch in _BATCHES_BY_LAYER]
    rows = [["us; ratio", *(str(found["batches"][place]) for place in shown)]]
    for layer, times in found["microseconds"].items():
        cells = []
        for place in shown:
            ours = times[_OURS][place]
            peer = min(values[place] for name, values in times.items() if name != _OURS)
            cells.append(f"{ours:.{0 if ours >= 1000 else 1}f}; {ours / peer:.2f}")
        rows.append([layer, *cells])
    return _table(rows)


def sustained_table() -> str:
    """Time over floor by contender and batch, replays back to back."""
    found = result("kernels-sustained-h200")
    rows = [["time over floor", *map(str, found["batches"])]]
    rows += [[name, *(f"{value:.2f}" for value in values)] for name, values in found["ratios"].items()]
    return _table(rows)


def floors_table() -> str:
    """Time over floor by contender and batch, and ours over the best peer's cell by cell."""
    found = result("kernels-h200")
    rows = [["time over floor", *map(str, found["batches"])]]
    rows += [[name, *(f"{value:.2f}" for value in values)] for name, values in over_floor(found).items()]
    ratios = [
        [
            times[_OURS][place] / min(values[place] for name, values in times.items() if name != _OURS)
            for times in found["microseconds"].values()
        ]
        for place in range(len(found["batches"]))
    ]
    rows.append(["ours over the best peer, best layer", *(f"{min(column):.2f}" for column in ratios)])
    rows.append(["ours over the best peer, worst layer", *(f"{max(column):.2f}" for column in ratios)])
    return _table(rows)


def elements_table() -> str:
    """Times of one model's layers by kind of weight and batch, beside cuBLAS and the hardware's limit."""
    measured = result("elements-h200")
    rows = [["us; over cuBLAS FP16; over the floor", *map(str, measured["batches"])]]
    for row in measured["rows"]:
        cells = zip(row["marlinq"], row["cublas"], row["floor"], strict=True)
        rows.append([row["weights"], *(f"{a:.1f}; {a / b:.2f}; {a / c:.2f}" for a, b, c in cells)])
    return _table(rows)


def elements_experts_table() -> str:
    """Times of one routed layer by kind of weight and batch, beside the floor of its bytes."""
    measured = result("elements-h200")["experts"]
    rows = [["us; over the floor", *map(str, measured["batches"])]]
    for name, row in measured["rows"].items():
        cells = zip(row["us"], row["floor"], strict=True)
        rows.append([name, *(f"{us:.1f}; {us / floor:.2f}" for us, floor in cells)])
    return _table(rows)


def elements_steps_table() -> str:
    """Decode steps by kind of weight and batch."""
    measured = result("elements-h200")["steps"]
    rows = [["ms", *(f"batch {batch}" for batch in measured["batches"])]]
    rows += [[name, *(f"{ms:.2f}" for ms in row)] for name, row in measured["rows"].items()]
    return _table(rows)


def experts_table() -> str:
    """Times of whole routed layers by model and batch, beside Humming and the hardware's limit."""
    found = result("experts-h200")
    rows = [["layer", "", *map(str, found["batches"])]]
    for layer, cell in found["layers"].items():
        ours = cell["marlinq"]
        rows.append([layer, "us", *(f"{time:.1f}" for time in ours)])
        for words, others in (("over Humming", cell["humming"]), ("over the floor", cell["floor"])):
            rows.append(["", words, *(f"{a / b:.2f}" for a, b in zip(ours, others, strict=True))])
    return _table(rows)


def quality_table() -> str:
    """Perplexity, KL divergence and top-1 agreement by package and method."""
    found = result("quality-smollm2")
    rows = [["package", "method", "perplexity", "mean KL (nats)", "top-1 agreement"]]
    rows.append(["original", "FP32", f"{found['original_perplexity']:.3f}", "", ""])
    rows += [
        [
            row["package"],
            row["method"],
            f"{row['perplexity']:.3f}" if "perplexity" in row else "",
            f"{row['kl']:.4f}",
            f"{row['top1']:.1f} %",
        ]
        for row in found["rows"]
    ]
    return _table(rows)


def quality_settings_table() -> str:
    """KL divergence on one text by kind of groups and package, and our ratio to AutoRound's on four texts."""
    found = result("quality-smollm2")
    packages = list(dict.fromkeys(row["package"] for row in found["settings"]))
    measured = {
        (row["group_size"], row["symmetric"], row["package"]): f"{row['kl']:.4f}" for row in found["settings"]
    }
    rows = [["groups", *packages, *(f"ratio, {name}" for name in found["ratios"]["names"])]]
    for setting in found["ratios"]["rows"]:
        size, symmetric = setting["group_size"], setting["symmetric"]
        name = "whole channel" if size == -1 else str(size)
        rows.append(
            [
                name if symmetric else f"{name}, zero points",
                *(measured[size, symmetric, package] for package in packages),
                *(f"{ratio:.2f}" for ratio in setting["ratios"]),
            ]
        )
    return _table(rows)


def quality_texts_table() -> str:
    """KL divergence and top-1 agreement on four kinds of text."""
    return _texts_table(result("quality-smollm2")["texts"])


def quality_gemma_table() -> str:
    """The same of Gemma 3 270M, groups of 64."""
    return _texts_table(result("quality-models")["models"][0])


def quality_qwen_table() -> str:
    """The same of Qwen2.5-Coder-0.5B, groups of 128, with the ratio of both rows."""
    found = result("quality-models")["models"][1]
    ours, peer = (row["measured"] for row in found["rows"])
    ratios = [f"{a[0] / b[0]:.2f}" for a, b in zip(ours, peer, strict=True)]
    return "\n".join([_texts_table(found), f"| | ratio of the KL | {' | '.join(ratios)} |"])


def _texts_table(found: dict[str, Any]) -> str:
    rows = [["package", "method", *found["names"]]]
    rows += [
        [row["package"], row["method"], *(f"{kl:.4f} / {top1:.1f} %" for kl, top1 in row["measured"])]
        for row in found["rows"]
    ]
    return _table(rows)


def head_table() -> str:
    """Perplexity, KL divergence and top-1 agreement by bits of blocks and output head."""
    bits = {"none": "16-bit", "int8": "8-bit", "int4": "4-bit"}
    rows = [["blocks", "output head", "perplexity", "mean KL (nats)", "top-1 agreement"]]
    for row in result("head-smollm2")["rows"]:
        figures = ["", ""]
        if "kl" in row:
            figures = [f"{row['kl']:.4f}", f"{100 * row['top1_agreement']:.2f} %"]
        rows.append([row["blocks"], bits[row["head"]], f"{row['perplexity']:.3f}", *figures])
    return _table(rows)


def decode_table() -> str:
    """Decode steps by batch and context."""
    rows = [["batch", "context", "first token", "step", "tokens/s", "GB/s"]]
    rows += [
        [
            str(cell["batch"]),
            str(cell["context"]),
            f"{1e3 * cell['first_token_seconds']:.1f} ms",
            f"{1e3 * cell['step_seconds']:.3f} ms",
            f"{cell['tokens_per_second']:,.0f}",
            f"{cell['bandwidth'] / 1e9:,.0f}",
        ]
        for cell in result("decode-h200")["cells"]
    ]
    return _table(rows)


def plugin_table() -> str:
    """Decode steps of vLLM with its own kernels and with ours."""
    found = result("decode-plugin-h200")
    own, plugin = found["rows"].values()
    rows = [["", *(f"batch {batch}" for batch in found["batches"])]]
    rows += [[name, *(f"{value:.2f} ms" for value in values)] for name, values in found["rows"].items()]
    rows.append(["ratio", *(f"{ours / theirs:.2f}" for theirs, ours in zip(own, plugin, strict=True))])
    return _table(rows)


def plugin_requests_table() -> str:
    """Time to first tokens, throughput and start-up of vLLM with its own kernels and with marlinq's."""
    found = result("decode-plugin-h200")
    rows = [["", "first token, 1 prompt", "8 prompts", "256 requests", "start"]]
    for name, times in found["first_token_ms"].items():
        rate, start = found["tokens_per_second"][name], found["start_seconds"][name]
        rows.append(
            [name, *(f"{ms:.1f} ms" for ms in times.values()), f"{rate:,} tokens/s", f"{start:.1f} s"]
        )
    return _table(rows)


def plugin_mixture_table() -> str:
    """A mixture's decode step in vLLM, by a clock and by its kernels' times."""
    found = result("decode-plugin-h200")["mixture"]
    rows = [["", *(f"batch {batch}" for batch in found["batches"])]]
    for name, times in found["rows"].items():
        pairs = zip(times["gpu"], times["wall"], strict=True)
        rows.append([name, *("-" if wall is None else f"{gpu:.2f} of {wall:.2f} ms" for gpu, wall in pairs)])
    return _table(rows)


def shapes_table() -> str:
    """A step of one sequence by model shape, beside a plain read of the step's bytes."""
    rows = [["shape", "bytes a step", "step", "plain read of the bytes", "over it"]]
    for found in result("decode-shapes-h200")["shapes"]:
        (cell,) = found["cells"]
        read = cell["step_bytes"] / READ_BYTES_PER_SECOND
        rows.append(
            [
                found["checkpoint"].split()[1].rstrip(","),
                f"{cell['step_bytes'] / 1e9:.2f} GB",
                f"{1e3 * cell['step_seconds']:.3f} ms",
                f"{1e3 * read:.3f} ms",
                f"{cell['step_seconds'] / read:.2f}",
            ]
        )
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


TABLES: dict[str, Callable[[], str]] = {
    "kernels": kernels_table,
    "floors": floors_table,
    "elements": elements_table,
    "elements-experts": elements_experts_table,
    "elements-steps": elements_steps_table,
    "sustained": sustained_table,
    "experts": experts_table,
    "quality": quality_table,
    "quality-settings": quality_settings_table,
    "quality-texts": quality_texts_table,
    "quality-gemma": quality_gemma_table,
    "quality-qwen": quality_qwen_table,
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
