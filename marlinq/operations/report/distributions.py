"""The distributions of codes and scales on the page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from marlinq.operations.report.charts import band, bars
from marlinq.operations.report.figures import BINS_PER_OCTAVE, OCTAVES, CheckpointFigures, ModuleFigures
from marlinq.operations.report.markup import Element, tag

_WIDTH, _HEIGHT = 212, 74


def codes_section(checkpoints: Sequence[CheckpointFigures], labels: Sequence[str] = ()) -> Element:
    """How often each code occurs, a histogram for each projection."""
    sampled = min(figures.sampled for figures in checkpoints)
    extent = "all codes" if sampled >= 1 else f"{sampled:.2g} of the codes, evenly spread"
    text = (
        f"How often each code occurs ({extent}). The outermost codes hold what was clipped; a module that "
        "leaves codes unused wastes its range."
    )
    parts = []
    for index, figures in enumerate(checkpoints):
        charts = [_code_chart(name, modules) for name, modules in _kinds(figures).items()]
        parts.append(_group(labels, index, charts))
    return tag("section", tag("h2", "Codes"), tag("p", text, class_="faint"), parts)


def scales_section(checkpoints: Sequence[CheckpointFigures], labels: Sequence[str] = ()) -> Element:
    """All magnitudes of scales, and their course through the blocks for each projection."""
    text = (
        "Magnitudes of the scales. First all of them, by quarter octaves; then for each projection the "
        "median (line) and the middle 90 % (band) from the first block to the last, on one logarithmic axis."
    )
    values = [
        value
        for figures in checkpoints
        for module in figures.modules
        for value in (module.scales.low, module.scales.high)
        if value > 0
    ]
    limits = (min(values), max(values)) if values else (1e-6, 1.0)
    parts = []
    for index, figures in enumerate(checkpoints):
        charts = [_all_scales(figures)]
        charts += [_course(name, modules, limits) for name, modules in _kinds(figures).items()]
        parts.append(_group(labels, index, charts))
    return tag("section", tag("h2", "Scales"), tag("p", text, class_="faint"), parts)


def _group(labels: Sequence[str], index: int, charts: Sequence[Element]) -> list[Element]:
    title = [tag("h3", labels[index], style="margin-top:14px")] if labels else []
    return [*title, tag("div", charts, class_="grid")]


def _kinds(figures: CheckpointFigures) -> dict[str, list[ModuleFigures]]:
    """The modules by projection, and by width where a projection has several."""
    found: dict[str, list[ModuleFigures]] = {}
    widths: dict[str, set[int]] = {}
    for module in figures.modules:
        widths.setdefault(module.projection, set()).add(module.bits)
    for module in figures.modules:
        several = len(widths[module.projection]) > 1
        name = f"{module.projection}, {module.bits} bits" if several else module.projection
        found.setdefault(name, []).append(module)
    return found


def _code_chart(name: str, modules: Sequence[ModuleFigures]) -> Element:
    counts = np.sum([module.codes for module in modules], axis=0)
    total = max(1, int(counts.sum()))
    shares = [int(count) / total for count in counts]
    hints = [f"code {code}: {share:.2%}" for code, share in enumerate(shares)]
    ends = shares[0] + shares[-1]
    unused = sum(1 for share in shares if share == 0)
    caption = f"{ends:.2%} at the ends" + (f", {unused} codes unused" if unused else "")
    chart = bars(shares, hints, f"Codes of {name}", width=_WIDTH, height=_HEIGHT)
    return tag("figure", tag("h3", name), chart, tag("figcaption", caption))


def _all_scales(figures: CheckpointFigures) -> Element:
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
    return tag("figure", tag("h3", "all"), chart, tag("figcaption", caption))


def _course(name: str, modules: Sequence[ModuleFigures], limits: tuple[float, float]) -> Element:
    ordered = sorted(modules, key=lambda module: module.block or 0)
    points = [(module.scales.low, module.scales.middle, module.scales.high) for module in ordered]
    points = [point for point in points if min(point) > 0]
    middle = sorted(point[1] for point in points)
    if not points:
        return tag("figure", tag("h3", name), tag("figcaption", "no scale above 0"))
    if len(points) == 1:
        points = points * 2
    caption = f"median {middle[0]:.2g} to {middle[-1]:.2g}"
    chart = band(points, limits, f"Scales of {name} through the blocks", width=_WIDTH, height=_HEIGHT)
    return tag("figure", tag("h3", name), chart, tag("figcaption", caption))
