"""The roofline of a recommendation, as an SVG in the style of reports."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from marlinq.core.errors import OutputError
from marlinq.operations.recommend.recommendation import Recommendation
from marlinq.operations.report.markup import HtmlElement, style_sheet, tag
from marlinq.operations.report.style import style_rules

_LEFT, _TOP, _WIDTH, _HEIGHT, _KEY = 70, 60, 560, 340, 24
_MARKED = (1, 16, 64, 256)


def roofline(found: Recommendation) -> str:
    """SVG of operations a second over operations a byte: the GPU's limits, and a curve over the batches for
    each type of weights."""
    curves = [one for one in found.candidates if one.points]
    roofs = [("16-bit peak", found.half), *([("FP8 peak", found.fp8)] if found.fp8 else [])]
    intensities = [point.intensity for one in curves for point in one.points] or [1.0]
    rates = [point.rate for one in curves for point in one.points] or [1e12]
    x = _Scale(min(intensities) / 2, max([*intensities, 2 * found.half / found.bandwidth]), _LEFT, _WIDTH)
    y = _Scale(min(rates) / 2, 1.5 * max(rate for _, rate in roofs), _TOP + _HEIGHT, -_HEIGHT)
    marks: list[HtmlElement] = []
    for value in x.decades():
        marks.append(_line([(x.at(value), _TOP), (x.at(value), _TOP + _HEIGHT)], "axis"))
        marks.append(_text(x.at(value), _TOP + _HEIGHT + 16, f"{value:g}", "label middle"))
    for value in y.decades():
        marks.append(_line([(_LEFT, y.at(value)), (_LEFT + _WIDTH, y.at(value))], "axis"))
        marks.append(_text(_LEFT - 8, y.at(value) + 4, f"{value / 1e12:g}", "label end"))
    for label, rate in roofs:
        knee = rate / found.bandwidth
        low = max(x.low, y.low / found.bandwidth)
        path = [(x.at(low), y.at(low * found.bandwidth))]
        path += [(x.at(min(knee, x.high)), y.at(min(knee, x.high) * found.bandwidth))]
        path += [(x.at(x.high), y.at(rate))] if knee < x.high else []
        marks.append(_line(path, "roof"))
        marks.append(_text(_LEFT + _WIDTH, y.at(rate) - 5, label, "label end faint"))
    for number, one in enumerate(curves):
        colour = f"var(--p{number % 8})"
        path = [(x.at(point.intensity), y.at(point.rate)) for point in one.points]
        marks.append(_line(path, "curve", f"stroke:{colour}"))
        marks += [
            tag(
                "circle",
                tag("title", f"{one.name}, batch {point.batch}: {1e3 * point.step_seconds:.2f} ms"),
                cx=x.at(point.intensity), cy=y.at(point.rate), r="3", style=f"fill:{colour}",
            )
            for point in one.points
            if point.batch in _MARKED
        ]  # fmt: skip
        at = _TOP + 12 + 18 * number
        marks.append(
            tag("rect", x=_LEFT + _WIDTH + _KEY, y=at - 9, width=10, height=10, style=f"fill:{colour}")
        )
        marks.append(_text(_LEFT + _WIDTH + _KEY + 16, at, one.name, "label"))
    title = f"{found.model} on {found.gpu.partition(' (')[0]}, {found.context} tokens of context"
    marks += [
        _text(_LEFT, 24, f"Decode steps under the roofline: {title}", "label"),
        _text(_LEFT, 42, f"TFLOPS; dots: batch {', '.join(map(str, _MARKED))}", "label faint"),
        _text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 36, "operations a byte", "label middle"),
    ]
    own = (
        "svg{background:var(--card)}.roof{fill:none;stroke:var(--faint);stroke-width:1.4}"
        ".curve{fill:none;stroke-width:1.8}"
    )
    drawing = tag(
        "svg",
        style_sheet(style_rules() + own),
        marks,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_LEFT + _WIDTH + 130} {_TOP + _HEIGHT + 54}",
        role="img",
    )
    return drawing.markup + "\n"


def save_plot(found: Recommendation, path: str | os.PathLike[str]) -> None:
    """Draws the roofline into a file.

    Raises:
        OutputError: the file can't be written.
    """
    try:
        Path(path).write_text(roofline(found), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{os.fspath(path)}: {error.strerror or error}; choose another --plot") from None


class _Scale:
    """A logarithmic axis: values from ``low`` to ``high`` map to ``length`` pixels from ``start`` on."""

    def __init__(self, low: float, high: float, start: float, length: float) -> None:
        self.low, self.high = low, high
        self._start, self._length = start, length

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self._start + self._length * share

    def decades(self) -> list[float]:
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1)]


def _line(points: Sequence[tuple[float, float]], kind: str, style: str | None = None) -> HtmlElement:
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=kind, style=style)


def _text(x: float, y: float, text: str, kind: str) -> HtmlElement:
    return tag("text", text, x=f"{x:.1f}", y=f"{y:.1f}", class_=kind)
