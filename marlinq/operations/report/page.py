"""The HTML page: one file without scripts and without links to other files.

``page.html.jinja`` is its layout, this module computes its values. Names and settings come from checkpoints,
which may be hostile: the template escapes every value except finished drawings
(:mod:`marlinq.operations.report.markup`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from marlinq.core.safe_text import escaped
from marlinq.core.version import __version__
from marlinq.methods.quantity import ErrorQuantity
from marlinq.operations.report.charts import STEPS, Ramp, heat_map, share_bar
from marlinq.operations.report.distributions import code_charts, scale_charts
from marlinq.operations.report.evaluation import TASK_COLUMNS
from marlinq.operations.report.figures import CheckpointFigures, ModuleFigures, TimeFigures, cell_error
from marlinq.operations.report.markup import HtmlElement, style_sheet
from marlinq.operations.report.style import style_rules

if TYPE_CHECKING:
    from jinja2 import Template

GENERATOR = "marlinq report"
"""Value of the page's ``generator`` before the version, by which a file is recognised as a report."""

_WORST = 12
_KEPT = 12
_ENDS = 6  # places whose error changes most, at either end


def page(checkpoints: Sequence[CheckpointFigures]) -> str:
    """The report of one checkpoint, or of two side by side, as HTML."""
    labels = _labels(checkpoints)
    pair = len(checkpoints) > 1
    sampled = min(figures.sampled for figures in checkpoints)
    titles = labels if pair else [""]
    return _template().render(
        checkpoints=list(checkpoints),
        one=None if pair else checkpoints[0],
        labels=labels,
        maps=_two_maps(checkpoints) if pair else _one_map(checkpoints[0]),
        ratios=_ratios(checkpoints[0], checkpoints[1], labels) if pair else None,
        extent="all codes" if sampled >= 1 else f"{sampled:.2g} of the codes, evenly spread",
        codes=list(zip(titles, map(code_charts, checkpoints), strict=True)),
        scales=list(zip(titles, scale_charts(checkpoints), strict=True)),
        task_columns=TASK_COLUMNS,
        shares=share_bar,
        legend_of=_legend_of,
        steps=STEPS,
        style=style_sheet(style_rules()),
        generator=f"{GENERATOR} {__version__}",
        version=__version__,
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        # Unprintable characters become escapes; only Element values are markup.
        finalize=lambda value: escaped(value) if type(value) is str else value,
    )
    environment.filters |= {
        "glance": _glance,
        "kept_rows": _kept_rows,
        "percent": percent,
        "recipe_rows": _recipe_rows,
        "size_parts": lambda figures: [(name, count, size(count)) for name, count in figures.sizes.items()],
        "subtitle": _subtitle,
        "tiles": _tiles,
        "time_line": _time_line,
        "time_parts": lambda time: [(name, seconds, duration(seconds)) for name, seconds in time.stages],
        "tokens_seen": _tokens_seen,
        "warnings": _warnings,
        "worst_modules": _worst_modules,
    }
    return environment.get_template("page.html.jinja")


def _subtitle(figures: CheckpointFigures) -> str:
    quality = figures.recipe.get("quality")
    recipe = f", recipe {quality}" if quality else ""
    kinds = sorted({module.scheme for module in figures.modules})
    others = len(kinds) - 1
    more = f" and {others} other kind{'s' if others > 1 else ''}" if others else ""
    return f"{figures.architecture} in {figures.format}{recipe}: {kinds[0]}{more}"


def _tiles(figures: CheckpointFigures) -> list[tuple[str, str]]:
    tokens = figures.calibration.get("tokens")
    facts = [
        (size(figures.nbytes), f"on disk; {size(figures.wide_bytes)} in 16 bits"),
        (f"{figures.bits_per_weight:.2f}", "bits per weight, whole model"),
        (f"{len(figures.modules):,}", f"linears in {len(figures.blocks)} blocks quantised"),
        (percent(figures.median_error), f"median {figures.error_label}, squared"),
        (percent(figures.errors[-1] if figures.errors else None), f"largest {figures.error_label}"),
    ]
    if tokens:
        documents = figures.calibration.get("documents", "?")
        facts.append((f"{_grouped(tokens)}", f"calibration tokens in {documents} documents"))
    if figures.time:
        facts.append((duration(figures.time.total), f"on {figures.time.device}"))
    return facts


def _warnings(figures: CheckpointFigures) -> list[str]:
    lines = [*figures.notes, *_other_errors(figures)]
    fallbacks: dict[str, list[ModuleFigures]] = {}
    for module in figures.modules:
        if module.fallback:
            # Only the text after the last colon is the same for all modules with this fallback.
            fallbacks.setdefault(module.fallback.rpartition(": ")[2], []).append(module)
    for what, modules in list(fallbacks.items())[:_WORST]:
        more = f" and {len(modules) - 1} more modules" if len(modules) > 1 else ""
        lines.append(f"Fallback in {modules[0].name}{more}: {modules[0].fallback if not more else what}")
    bad = [module for module in figures.modules if module.scales.bad]
    lines += [f"{module.name}: {module.scales.bad} scales are NaN or infinite" for module in bad[:_WORST]]
    return lines


def _other_errors(figures: CheckpointFigures) -> list[str]:
    """A line for each further quantity of errors, which the page's maps and tables leave out."""
    lines = []
    for quantity in (*ErrorQuantity, None):
        modules = figures.modules_of(quantity)
        if modules and quantity != figures.quantity:
            label = (
                "error of a quantity that the manifest does not name" if quantity is None else quantity.label
            )
            worst = max(modules, key=lambda module: module.error or 0.0)
            more = f" and {len(modules) - 1} more modules" if len(modules) > 1 else ""
            lines.append(
                f"Not in the maps and tables of the {figures.error_label}: {worst.name}{more}, whose {label} "
                f"is {percent(worst.error)}{' at most' if more else ''}."
            )
    return lines


def _meaning(figures: CheckpointFigures) -> str:
    if figures.quantity is None:
        return "Relative squared error; the manifest does not name the quantity."
    return figures.quantity.meaning


def _error_map(figures: CheckpointFigures, ramp: Ramp) -> HtmlElement:
    """A heat map of the errors by projection and block."""
    cells = {}
    for (projection, block), modules in figures.cells().items():
        error = cell_error(modules)
        experts = f", worst of {len(modules)} experts" if len(modules) > 1 else ""
        cells[projection, block] = error, f"block {block}, {projection}: {percent(error)}{experts}"
    return heat_map(
        figures.projections, figures.blocks, cells, ramp, f"{figures.error_label} by projection and block"
    )


class ErrorMap(NamedTuple):
    """One checkpoint's errors: its name where there are two, the drawing, its colours, the error's
    meaning."""

    label: str
    drawing: HtmlElement
    ramp: Ramp
    meaning: str


class ErrorMaps(NamedTuple):
    """A section of error maps; ``together``: they share one colour scale; ``outside``: modules outside the
    decoder blocks."""

    title: str
    note: str
    maps: list[ErrorMap]
    together: bool
    outside: list[ModuleFigures]


def _one_map(figures: CheckpointFigures) -> ErrorMaps | None:
    if not figures.errors:
        return None
    ramp = Ramp.over(figures.errors)
    return ErrorMaps(
        f"{figures.error_label.capitalize()} of each module",
        f"{_meaning(figures)} A column is a decoder block.",
        [ErrorMap("", _error_map(figures, ramp), ramp, "")],
        together=True,
        outside=[module for module in figures.worst if module.block is None][:_WORST],
    )


def _two_maps(checkpoints: Sequence[CheckpointFigures]) -> ErrorMaps | None:
    known = [figures for figures in checkpoints if figures.errors]
    if not known:
        return None
    together = _comparable(known)
    common = Ramp.over([error for figures in known for error in figures.errors])
    maps = []
    for label, figures in zip(_labels(checkpoints), checkpoints, strict=True):
        if figures.errors:
            ramp = common if together else Ramp.over(figures.errors)
            maps.append(ErrorMap(label, _error_map(figures, ramp), ramp, _meaning(figures)))
    note = (
        f"{_meaning(known[0])} One scale for both."
        if together
        else "The two runs report different quantities, which can't be compared: each map has its own scale."
    )
    return ErrorMaps("Error of each module", note, maps, together, [])


def _worst_modules(figures: CheckpointFigures) -> list[tuple[ModuleFigures, str, str]]:
    """(module, width of its bar, its error as a multiple of its projection's median), worst first."""
    by_kind: dict[str, list[float]] = {}
    for module in figures.worst:
        by_kind.setdefault(module.projection, []).append(module.error or 0.0)
    rows = []
    for module in figures.worst[:_WORST]:
        error = module.error or 0.0
        usual = median(by_kind[module.projection])
        width = 100 * error / (figures.worst[0].error or 1.0)
        rows.append((module, f"{width:.0f}", f"{error / usual:.1f}×" if usual > 0 else ""))
    return rows


def _tokens_seen(figures: CheckpointFigures) -> str | list[tuple[str, ...]]:
    """A sentence if all modules saw the same number of tokens, else a row for each projection."""
    seen = [module for module in figures.modules if module.tokens is not None]
    counts = {module.tokens for module in seen}
    if len(counts) == 1:
        return f"Every module saw {counts.pop():,} tokens."
    rows = []
    for projection in dict.fromkeys(module.projection for module in seen):
        tokens = sorted(module.tokens or 0 for module in seen if module.projection == projection)
        starved = tokens.count(0)
        shown = (tokens[0], median(tokens), tokens[-1])
        rows.append((projection, *(f"{count:,.0f}" for count in shown), f"{starved:,}" if starved else ""))
    return rows


def _time_line(time: TimeFigures) -> str:
    ranks = f", {time.ranks} processes" if time.ranks > 1 else ""
    blocks = time.blocks
    each = f"; a block took {duration(median(blocks))} (median of {len(blocks)})" if blocks else ""
    return f"{duration(time.total)} on {time.device}{ranks}{each}."


def _legend_of(parts: Sequence[tuple[str, float, str]]) -> list[tuple[str, str, str]]:
    """(name, size in words, share) of each part."""
    total = sum(size for _, size, _ in parts) or 1.0
    return [(name, words, f"{size / total:.1%}") for name, size, words in parts]


def _recipe_rows(checkpoints: Sequence[CheckpointFigures]) -> list[tuple[str, list[str]]]:
    sources = [
        {**figures.recipe, **{f"calibration {key}": value for key, value in figures.calibration.items()},
         **figures.environment}
        for figures in checkpoints
    ]  # fmt: skip
    keys = dict.fromkeys(key for source in sources for key in source)
    return [(key, [source.get(key, "") for source in sources]) for key in keys]


def _kept_rows(figures: CheckpointFigures) -> list[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for name, reason in figures.kept.items():
        reasons.setdefault(reason, []).append(name)
    return [
        (
            ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            reason or "no reason is recorded",
        )
        for reason, names in list(reasons.items())[:_KEPT]
    ]


def _glance(checkpoints: Sequence[CheckpointFigures]) -> list[tuple[str, list[str]]]:
    return [
        ("format", [figures.format for figures in checkpoints]),
        ("size", [size(figures.nbytes) for figures in checkpoints]),
        ("bits per weight", [f"{figures.bits_per_weight:.2f}" for figures in checkpoints]),
        ("quantised linears", [f"{len(figures.modules):,}" for figures in checkpoints]),
        *_error_rows(checkpoints),
        ("worst module", [figures.worst[0].name if figures.worst else "unknown" for figures in checkpoints]),
        ("time", [duration(figures.time.total) if figures.time else "unknown" for figures in checkpoints]),
    ]


def _comparable(checkpoints: Sequence[CheckpointFigures]) -> bool:
    """Whether all checkpoints have known errors of one quantity."""
    quantities = {figures.quantity for figures in checkpoints}
    return len(quantities) == 1 and None not in quantities


def _error_rows(checkpoints: Sequence[CheckpointFigures]) -> list[tuple[str, list[str]]]:
    """Two rows for each quantity, without a figure for checkpoints whose errors have another quantity."""
    rows = []
    for quantity in dict.fromkeys(figures.quantity for figures in checkpoints if figures.errors):
        columns = [figures if figures.quantity == quantity else None for figures in checkpoints]
        label = next(figures.error_label for figures in columns if figures is not None)
        rows.append(
            (f"median {label}", [percent(one.median_error) if one and one.errors else "" for one in columns])
        )
        rows.append(
            (f"largest {label}", [percent(one.errors[-1]) if one and one.errors else "" for one in columns])
        )
    return rows


class ErrorRatios(NamedTuple):
    """Ratios of two checkpoints' errors: in words, as a map, and the places with the largest changes."""

    text: str
    drawing: HtmlElement
    ramp: Ramp
    low: str
    high: str
    falls: list[tuple[str, str]]
    rises: list[tuple[str, str]]


def _ratios(one: CheckpointFigures, other: CheckpointFigures, labels: Sequence[str]) -> ErrorRatios | None:
    if not _comparable((one, other)):
        return None
    mine, theirs = one.cells(), other.cells()
    ratios: dict[tuple[str, int], float] = {}
    for key in mine:
        before, after = cell_error(mine[key]), cell_error(theirs.get(key, []))
        if before and after:
            ratios[key] = after / before
    if not ratios:
        return None
    ramp = Ramp.around_one(list(ratios.values()))
    cells = {key: (ratio, f"block {key[1]}, {key[0]}: {ratio:.2f}×") for key, ratio in ratios.items()}
    picture = heat_map(
        one.projections, one.blocks, cells, ramp, "Ratio of the errors by projection and block"
    )
    ordered = sorted(ratios.items(), key=lambda entry: entry[1])
    better = sum(1 for ratio in ratios.values() if ratio < 1)
    text = (
        f"{one.error_label.capitalize()} of {labels[1]} divided by that of {labels[0]}: "
        f"smaller in {better} of {len(ratios)} places, median {median(ratios.values()):.2f}×. "
        "Each run's errors are measured on its own text."
    )

    listed = [(f"block {block}, {projection}", f"{ratio:.2f}×") for (projection, block), ratio in ordered]
    low, high = f"{ramp.low:.2f}×", f"{ramp.high:.2f}×"
    return ErrorRatios(text, picture, ramp, low, high, listed[:_ENDS], listed[::-1][:_ENDS])


def _labels(checkpoints: Sequence[CheckpointFigures]) -> list[str]:
    """The checkpoints' names, numbered where they are equal."""
    names = [figures.name for figures in checkpoints]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def percent(value: float | None) -> str:
    """A share in per cent with three digits."""
    if value is None:
        return "unknown"
    return f"{100 * value:.3g} %"


def size(count: int) -> str:
    """Bytes in decimal units."""
    for unit, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= least:
            return f"{count / least:.3g} {unit}" if count < 1000 * least else f"{count / least:.0f} {unit}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """Seconds as text, such as ``1 min 5 s``."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 100:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.3g} s"


def _grouped(text: str) -> str:
    return f"{int(text):,}" if text.isascii() and text.isdigit() and len(text) < 16 else text
