"""The charts of the distributions of codes and scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from marlinq.operations.report.charts import band, bars
from marlinq.operations.report.figures import BINS_PER_OCTAVE, OCTAVES, CheckpointFigures, ModuleFigures
from marlinq.operations.report.markup import HtmlElement

_WIDTH, _HEIGHT = 212, 74


class Chart(NamedTuple):
    """A drawing with title and caption; the drawing is None where there is nothing to draw."""

    title: str
    drawing: HtmlElement | None
    caption: str


def code_charts(figures: CheckpointFigures) -> list[Chart]:
    """A histogram of the codes for each projection."""
    return [_code_chart(name, modules) for name, modules in _kinds(figures).items()]


def scale_charts(checkpoints: Sequence[CheckpointFigures]) -> list[list[Chart]]:
    """For each checkpoint, a histogram of all scales, and a chart over the blocks for each projection."""
    values = [
        value
        for figures in checkpoints
        for module in figures.modules
        for value in (module.scales.low, module.scales.high)
        if value > 0
    ]
    limits = (min(values), max(values)) if values else (1e-6, 1.0)
    return [
        [_all_scales(figures), *(_course(name, modules, limits) for name, modules in _kinds(figures).items())]
        for figures in checkpoints
    ]


def _kinds(figures: CheckpointFigures) -> dict[str, list[ModuleFigures]]:
    """Modules by projection, and by bits where a projection has several."""
    kinds: dict[str, list[ModuleFigures]] = {}
    widths: dict[str, set[int]] = {}
    for module in figures.modules:
        widths.setdefault(module.projection, set()).add(module.bits)
    for module in figures.modules:
        several = len(widths[module.projection]) > 1
        name = f"{module.projection}, {module.bits} bits" if several else module.projection
        kinds.setdefault(name, []).append(module)
    return kinds


def _code_chart(name: str, modules: Sequence[ModuleFigures]) -> Chart:
    counts = np.sum([module.codes for module in modules], axis=0)
    total = max(1, int(counts.sum()))
    shares = [int(count) / total for count in counts]
    hints = [f"code {code}: {share:.2%}" for code, share in enumerate(shares)]
    ends = shares[0] + shares[-1]
    unused = sum(1 for share in shares if share == 0)
    caption = f"{ends:.2%} at the ends" + (f", {unused} codes unused" if unused else "")
    chart = bars(shares, hints, f"Codes of {name}", width=_WIDTH, height=_HEIGHT)
    return Chart(name, chart, caption)


def _all_scales(figures: CheckpointFigures) -> Chart:
    counts = np.sum([module.scales.bins for module in figures.modules], axis=0)
    used = np.nonzero(counts)[0]
    first, last = (int(used[0]), int(used[-1]) + 1) if used.size else (0, 1)
    total = max(1, int(counts.sum()))
    shares = [int(count) / total for count in counts[first:last]]
    edges = [2.0 ** (OCTAVES[0] + index / BINS_PER_OCTAVE) for index in range(first, last + 1)]
    hints = [f"{edges[i]:.3g} to {edges[i + 1]:.3g}: {share:.2%}" for i, share in enumerate(shares)]
    signs = sum(module.scales.negative * module.scales.counted for module in figures.modules)
    negative = signs / max(1, sum(module.scales.counted for module in figures.modules))
    caption = f"{edges[0]:.2g} to {edges[-1]:.2g}" + (f", {negative:.0%} negative" if negative else "")
    chart = bars(shares, hints, "All scales", width=_WIDTH, height=_HEIGHT)
    return Chart("all", chart, caption)


def _course(name: str, modules: Sequence[ModuleFigures], limits: tuple[float, float]) -> Chart:
    ordered = sorted(modules, key=lambda module: module.block or 0)
    points = [(module.scales.low, module.scales.middle, module.scales.high) for module in ordered]
    points = [point for point in points if min(point) > 0]
    middle = sorted(point[1] for point in points)
    if not points:
        return Chart(name, None, "no scale above 0")
    if len(points) == 1:
        points = points * 2
    caption = f"median {middle[0]:.2g} to {middle[-1]:.2g}"
    chart = band(points, limits, f"Scales of {name} through the blocks", width=_WIDTH, height=_HEIGHT)
    return Chart(name, chart, caption)
