"""Draws the decode steps of two engines by batch, as an SVG for light and dark screens."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from marlinq.core.errors import OutputError
from marlinq.operations.bench.serve import ServeBench

STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #24292f }
  .title { font-weight: 600; font-size: 15px } .small { font-size: 11px; fill: #57606a }
  .ours { fill: #0969da } .other { fill: #6e7781 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .ours { fill: #58a6ff } .other { fill: #9198a1 }
  }
"""
_LEFT, _TOP, _WIDTH, _STEP, _BAR = 170, 84, 330, 74, 20


def steps_plot(steps: Mapping[str, Mapping[str, float]], told: tuple[str, str]) -> str:
    """SVG of the tokens per second of each sequence, with two bars per batch.

    Args:
        steps: engine -> batch -> seconds of a step; the second engine is marlinq's.
        told: two lines of text: what was measured, and the hardware.
    """
    (other, slower), (ours, faster) = steps.items()
    longest = max(1 / seconds for seconds in (*slower.values(), *faster.values()))
    height = _TOP + len(slower) * _STEP
    parts = [
        '<text class="title" x="20" y="26">Tokens per second of each sequence (higher is better)</text>',
        *(
            f'<text class="small" x="20" y="{46 + 16 * row}">{_plain(line)}</text>'
            for row, line in enumerate(told)
        ),
    ]
    for index, batch in enumerate(slower):
        y = _TOP + index * _STEP
        parts.append(f'<text x="20" y="{y + 42}">batch {_plain(batch)}</text>')
        ratio = slower[batch] / faster[batch]
        for place, (kind, name, seconds, more) in enumerate(
            (("other", other, slower[batch], ""), ("ours", ours, faster[batch], f" ({ratio:.2f}x)"))
        ):
            at = y + 26 * place
            long = _WIDTH / seconds / longest
            parts.append(
                f'<text class="small" x="{_LEFT - 10}" y="{at + 15}" text-anchor="end">{_plain(name)}</text>'
                f'<rect class="{kind}" x="{_LEFT}" y="{at}" width="{long:.1f}" height="{_BAR}" rx="2"/>'
                f'<text x="{_LEFT + long + 8:.1f}" y="{at + 15}">{1 / seconds:,.0f}{more}</text>'
            )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 {height}" role="img">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def save_plot(report: ServeBench, path: str | os.PathLike[str]) -> None:
    """Draw the steps of ``report`` into a file.

    Raises:
        OutputError: the file can't be written.
    """
    work, first = report.workload, next(iter(report.engines.values()))
    told = (
        f"{Path(work.checkpoint).name}, context {work.context}, {work.dtype}",
        f"{first.device}, {first.versions}",
    )
    steps = {name: times.step_seconds for name, times in report.engines.items()}
    try:
        Path(path).write_text(steps_plot(steps, told), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{os.fspath(path)}: {error.strerror or error}; choose another --plot") from None


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
