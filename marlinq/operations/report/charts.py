"""The charts of a report, as SVG whose colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marlinq.operations.report.markup import HtmlElement, tag

STEPS = 9
"""number of colours in a ramp: the classes ``s0`` to ``s8`` or ``d0`` to ``d8``"""

_ROW, _GAP = 22, 1
_MAP_WIDTH = 1020
_CHARACTER, _LONGEST = 6.3, 32
"""pixels per character of a label, and the largest number of characters"""
_CELL = (9, 34)


@dataclass(frozen=True)
class Ramp:
    """A logarithmic map from values to colours.
    Attributes:
        low, high: values of the first and the last colour.
        kind: ``s`` for a sequential ramp, ``d`` for one that diverges from its middle.
    """

    low: float
    high: float
    kind: str = "s"

    @classmethod
    def over(cls, values: Sequence[float]) -> Ramp:
        """A sequential ramp over the 2 % to 98 % quantiles of positive values."""
        positive = sorted(value for value in values if value > 0)
        if not positive:
            return cls(1e-6, 1e-6)
        last = len(positive) - 1
        return cls(positive[round(0.02 * last)], positive[round(0.98 * last)])

    @classmethod
    def around_one(cls, ratios: Sequence[float]) -> Ramp:
        """A diverging ramp for ratios, symmetric around 1."""
        sizes = sorted(abs(math.log(ratio)) for ratio in ratios if ratio > 0)
        reach = max(sizes[round(0.98 * (len(sizes) - 1))] if sizes else 0.0, math.log(1.05))
        return cls(math.exp(-reach), math.exp(reach), "d")

    def step(self, value: float) -> str:
        """The CSS class of ``value``."""
        if value <= 0 or self.low <= 0:
            return f"{self.kind}0"
        low = math.log(self.low)
        span = math.log(self.high) - low
        if span <= 0:
            return f"{self.kind}{STEPS // 2}"
        share = (math.log(value) - low) / span
        return f"{self.kind}{min(STEPS - 1, max(0, round(share * (STEPS - 1))))}"


def heat_map(
    rows: Sequence[str],
    columns: Sequence[int],
    cells: Mapping[tuple[str, int], tuple[float | None, str]],
    ramp: Ramp,
    title: str,
) -> HtmlElement:
    """A heat map with a row for each projection and a column for each decoder block.
    Args:
        rows: names of the rows.
        columns: numbers of blocks, ascending.
        cells: (row, column) -> (value, tooltip); a value of None is hatched, an absent cell left out.
        ramp: colours of the values.
        title: text for screen readers.
    """
    left = round(_CHARACTER * max((len(_cut(row)) for row in rows), default=0)) + 16
    width = min(_CELL[1], max(_CELL[0], (_MAP_WIDTH - left) // max(1, len(columns))))
    marks = []
    for y, row in enumerate(rows):
        top = 4 + y * _ROW
        marks.append(tag("text", _cut(row), x=left - 8, y=top + 15, class_="label end"))
        for x, column in enumerate(columns):
            if (row, column) not in cells:
                continue
            value, hint = cells[row, column]
            marks.append(
                tag(
                    "rect",
                    tag("title", hint),
                    x=left + x * width,
                    y=top,
                    width=width - _GAP,
                    height=_ROW - _GAP,
                    rx=1.5,
                    class_="unknown" if value is None else ramp.step(value),
                )
            )
    bottom = 4 + len(rows) * _ROW
    every = next(step for step in (1, 2, 4, 5, 10, 20, 50, 100, 10**9) if step * width >= 26)
    marks += [
        tag("text", str(column), x=left + x * width + width / 2, y=bottom + 15, class_="label middle")
        for x, column in enumerate(columns)
        if x % every == 0
    ]
    marks.append(tag("text", "block", x=left - 8, y=bottom + 15, class_="label end faint"))
    return _drawing(marks, left + len(columns) * width + 8, bottom + 22, title)


def bars(
    shares: Sequence[float], hints: Sequence[str], title: str, *, width: int, height: int
) -> HtmlElement:
    """A histogram with a bar for each share; the largest share fills the height."""
    most = max(shares, default=0.0) or 1.0
    step = width / max(1, len(shares))
    marks = [
        tag(
            "rect",
            tag("title", hint),
            x=index * step,
            y=height - max(0.75 if share else 0.0, share / most * height),
            width=max(step - (1 if step > 4 else 0), 0.5),
            height=max(0.75 if share else 0.0, share / most * height),
            class_="bar",
        )
        for index, (share, hint) in enumerate(zip(shares, hints, strict=True))
    ]
    marks.append(tag("line", x1=0, x2=width, y1=height, y2=height, class_="axis"))
    return _drawing(marks, width, height + 1, title)


def band(
    points: Sequence[tuple[float, float, float]],
    limits: tuple[float, float],
    title: str,
    *,
    width: int,
    height: int,
) -> HtmlElement:
    """A line with a band around it, on a logarithmic axis.
    Args:
        points: (low end of the band, line, high end) for each place, all above 0.
        limits: values at the bottom and at the top.
        title: text for screen readers.
        width, height: pixels of the drawing.
    """
    low, high = map(math.log, limits)

    def at(index: int, value: float) -> str:
        x = width * (index + 0.5) / len(points)
        share = (math.log(max(value, limits[0])) - low) / (high - low or 1.0)
        return f"{x:.1f},{height - share * height:.1f}"

    upper = [at(index, point[2]) for index, point in enumerate(points)]
    lower = [at(index, point[0]) for index, point in enumerate(points)]
    line = [at(index, point[1]) for index, point in enumerate(points)]
    marks = [
        tag("line", x1=0, x2=width, y1=height, y2=height, class_="axis"),
        tag("path", d=f"M{' '.join([*upper, *reversed(lower)])}Z", class_="band"),
        tag("path", d=f"M{' '.join(line)}", class_="line"),
    ]
    return _drawing(marks, width, height + 1, title)


def share_bar(parts: Sequence[tuple[str, float, str]]) -> HtmlElement:
    """A bar that is split in proportion to sizes.
    Args:
        parts: (name, size, size in words) of each part.
    """
    total = sum(size for _, size, _ in parts) or 1.0
    pieces = []
    start = 0.0
    for index, (name, size, words) in enumerate(parts):
        share = size / total
        hint = tag("title", f"{name}: {words}, {share:.1%}")
        pieces.append(
            tag("rect", hint, x=start * 1000, y=0, width=share * 1000, height=20, class_=f"p{index % 8}")
        )
        start += share
    return tag(
        "svg", pieces, viewBox="0 0 1000 20", preserveAspectRatio="none", class_="stack", role="img",
        aria_label="; ".join(f"{name} {words}" for name, _, words in parts),
    )  # fmt: skip


def _drawing(marks: Sequence[HtmlElement], width: float, height: float, title: str) -> HtmlElement:
    return tag(
        "svg",
        marks,
        viewBox=f"0 0 {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
        aria_label=title,
    )


def _cut(name: str) -> str:
    half = _LONGEST // 2
    return name if len(name) <= _LONGEST else f"{name[: half - 1]}…{name[-half:]}"
