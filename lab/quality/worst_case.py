"""Measures recipes and peers on one model in one run, and tabulates the worst ratio over several runs.

    python -m lab.quality.worst_case row MODEL --row NAME --group-size G --calibration TEXT --text TEXT ...
        --work DIR --json LINES
    python -m lab.quality.worst_case table LINES ...

``row`` quantises the model by one recipe or by a peer (quality_peers.py) and appends its divergence on
each text to LINES, which belongs to one model and group size. Rows may run at the same time. All see the
same 64 documents but "autoround-best", which sees the whole calibration file in rows of 2,048 tokens.
``table`` prints each recipe's ratios over each peer: the worst and the mean of all files and texts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from lab.quality.measuring import measured
from marlinq import load, quantize
from marlinq.operations.quantize.recipe import Recipe

PEERS = Path(__file__).with_name("quality_peers.py")
OURS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, output Hessian": {"output_hessian": True},
    "default, text drawn anew": {
        "quality": "best",
        "tune_own_text": False,
        "tune_steps": 1,
        "output_hessian": False,
    },
    "best, documents": {"quality": "best", "tune_own_text": False},
    "best": {"quality": "best"},
}
"""Row -> changes of the recipe. Before a single step of tuning the calibration is as for 1,400."""
SAME_TEXT = ("64", "512", "512")
PEER_ROWS = {
    "autoround": SAME_TEXT,
    "autoround-best": ("100000", "100000", "2048"),
    "llmc-gptq-imatrix": SAME_TEXT,
    "llmc-awq-gptq": SAME_TEXT,
    "llmc-awq-gptq-imatrix": SAME_TEXT,
    "llmc-awq-signround": SAME_TEXT,
    "gptqmodel-mse": SAME_TEXT,
    "gptqmodel-mse-static": SAME_TEXT,
    "gptqmodel-mse-gptaq": SAME_TEXT,
    "gptqmodel-mse-foem": SAME_TEXT,
}
"""Row, a method of quality_peers.py -> documents, tokens of each, tokens of AutoRound's rows."""


def write(options: argparse.Namespace, out: Path) -> None:
    """Quantises to ``out``, in another process where a peer does it."""
    if options.row in OURS:
        recipe = Recipe(
            group_size=options.group_size, calibration=str(options.calibration), samples=64, max_length=512
        )
        quantize(options.model, out, recipe=recipe.replace(**OURS[options.row]), device=options.device)
        return
    documents, longest, row = PEER_ROWS[options.row]
    tokens = options.work / f"{options.row}.json"
    calibration = ["--calibration", str(options.calibration), "--samples", documents, "--max-length", longest]
    _peers("tokens", options.model, *calibration, "--out", tokens)
    setting = ["--group-size", options.group_size, "--row-length", row, "--device", options.device]
    _peers("quantize", options.model, tokens, options.work, "--method", options.row, *setting)
    (options.work / f"{options.row}-g{options.group_size}-sym").rename(out)


def row(options: argparse.Namespace) -> None:
    """Quantises, evaluates, appends a line."""
    options.work.mkdir(parents=True, exist_ok=True)
    out = options.work / options.row.replace(" ", "-").replace(",", "")
    start = time.perf_counter()
    if not out.exists():
        write(options, out)
    line: dict[str, Any] = {"row": options.row, "seconds": time.perf_counter() - start, "kl": {}, "top1": {}}
    original = load(options.model, device=options.device, dtype="float32")
    for text in options.text:
        result = measured(out, original, text, options)
        line["kl"][text.stem], line["top1"][text.stem] = result.kl, result.top1_agreement
    with options.json.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def table(options: argparse.Namespace) -> None:
    """Prints ratios over the peers' rows, and the worst and mean of them."""
    runs = {
        file.stem: {row["row"]: row["kl"] for row in map(json.loads, file.read_text().splitlines())}
        for file in options.lines
    }
    for peer in PEER_ROWS:
        for name in OURS:
            cells = {
                run: {text: rows[name][text] / kl for text, kl in rows[peer].items()}
                for run, rows in runs.items()
                if peer in rows and name in rows
            }
            if not cells:
                continue
            every = [ratio for ratios in cells.values() for ratio in ratios.values()]
            print(f"{name} over {peer}: worst {max(every):.2f}, mean {fmean(every):.2f}")
            for run, ratios in cells.items():
                print(f"  {run}: " + ", ".join(f"{text} {ratio:.2f}" for text, ratio in ratios.items()))


def _peers(*arguments: object) -> None:
    subprocess.run([sys.executable, str(PEERS), *map(str, arguments)], check=True)


def main() -> None:
    """One row, or the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("row")
    measuring.add_argument("model", type=Path)
    measuring.add_argument("--row", choices=[*OURS, *PEER_ROWS], required=True)
    measuring.add_argument("--group-size", type=int, required=True)
    measuring.add_argument("--calibration", type=Path, required=True)
    measuring.add_argument("--text", type=Path, required=True, action="append")
    measuring.add_argument("--work", type=Path, required=True, help="folder of this model and group size")
    measuring.add_argument("--json", type=Path, required=True, help="append the line here")
    measuring.add_argument("--windows", type=int, default=32)
    measuring.add_argument("--length", type=int, default=1024)
    measuring.add_argument("--device", default="cuda")
    measuring.set_defaults(run=row)
    showing = commands.add_parser("table")
    showing.add_argument("lines", type=Path, nargs="+")
    showing.set_defaults(run=table)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
