"""Figures in README's sentences are those of ``docs/results``; its tables and plots are made from there."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def results(name: str) -> Any:
    return json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def over_autoround(table: Any, method: str) -> list[float]:
    """KL of ``method`` over that of each run of AutoRound, for every text."""
    ours = [row for row in table["rows"] if row["method"] == f"`--quality {method}`"]
    theirs = [row for row in table["rows"] if row["package"] == "AutoRound"]
    assert ours
    assert theirs
    return [
        mine[0] / other[0]
        for one, peer in product(ours, theirs)
        for mine, other in zip(one["measured"], peer["measured"], strict=True)
    ]


def interval(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def test_ratios_to_autoround() -> None:
    smollm2 = results("quality-smollm2")
    groups = [ratio for row in smollm2["ratios"]["rows"] for ratio in row["ratios"]]
    best = interval(over_autoround(smollm2["texts"], "best"))
    assert f"six kinds of groups, four texts | {interval(groups)} | {best} (groups of 64) |" in README
    (gemma,) = (model for model in results("quality-models")["models"] if model["name"] == "Gemma 3 270M")
    default, best = (interval(over_autoround(gemma, method)) for method in ("default", "best"))
    assert f"Gemma 3 270M, groups of {gemma['group_size']}, four texts | {default} | {best} |" in README


def test_times_of_a_decode_step() -> None:
    found = results("decode-h200")
    assert "synthetic llama-3-8b" in found["checkpoint"]
    times = {
        cell["batch"]: f"{1e3 * cell['step_seconds']:.2f} ms"
        for cell in found["cells"]
        if cell["context"] == 128
    }
    assert f"context 128) takes {times[1]}, 16 sequences at once {times[16]}" in README
