"""Figures in README's sentences are those of ``docs/results``; its tables and plots are made from there."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_times_of_a_decode_step() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = json.loads((ROOT / "docs" / "results" / "decode-h200.json").read_text(encoding="utf-8"))
    assert "synthetic llama-3-8b" in found["checkpoint"]
    times = {
        cell["batch"]: f"{1e3 * cell['step_seconds']:.2f} ms"
        for cell in found["cells"]
        if cell["context"] == 128
    }
    assert f"context 128) takes {times[1]}, 16 sequences at once {times[16]}" in readme
