"""The page: one file without scripts that needs nothing from anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from marlinq.core.version import __version__
from marlinq.methods.quantity import ErrorQuantity
from marlinq.operations.report.charts import Ramp, heat_map, legend, stack
from marlinq.operations.report.distributions import codes_section, scales_section
from marlinq.operations.report.evaluation import TASK_COLUMNS
from marlinq.operations.report.figures import CheckpointFigures, ModuleFigures, TimeFigures, cell_error
from marlinq.operations.report.markup import Element, style_sheet, tag
from marlinq.operations.report.style import style_rules

GENERATOR = "marlinq report"
"""What the page's ``generator`` says before the version: how a file is known to be a report."""

_WORST = 12
_KEPT = 12
# Nothing may be loaded and no script may run, whatever a name held.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(checkpoints: Sequence[CheckpointFigures]) -> str:
    """The report of one checkpoint, or of two side by side, as HTML."""
    first = checkpoints[0]
    if len(checkpoints) == 1:
        title = first.name
        body = [_heading(first), _tiles(first), *_about_one(first)]
    else:
        title = " and ".join(_labels(checkpoints))
        body = [*_comparison(checkpoints)]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content=f"{GENERATOR} {__version__}"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"{title}: quantisation report"),
        style_sheet(style_rules()),
    )
    foot = tag(
        "footer", f"Made by marlinq {__version__}. report.csv has every module, report.json every figure."
    )
    return (
        "<!doctype html>\n" + tag("html", head, tag("body", tag("main", body, foot)), lang="en").markup + "\n"
    )


def _about_one(figures: CheckpointFigures) -> list[Element | None]:
    return [
        _notes(figures),
        _evaluation_section(figures),
        _error_section(figures),
        _worst_section(figures),
        codes_section([figures]),
        scales_section([figures]),
        _token_section(figures),
        _time_section(figures),
        _size_section([figures]),
        _recipe_section([figures]),
        _kept_section(figures),
    ]


def _heading(figures: CheckpointFigures) -> Element:
    quality = figures.recipe.get("quality")
    recipe = f", recipe {quality}" if quality else ""
    kinds = sorted({module.scheme for module in figures.modules})
    others = len(kinds) - 1
    more = f" and {others} other kind{'s' if others > 1 else ''}" if others else ""
    return tag(
        "header",
        tag("h1", figures.name),
        tag("p", f"{figures.architecture} in {figures.format}{recipe}: {kinds[0]}{more}", class_="sub"),
    )


def _tiles(figures: CheckpointFigures) -> Element:
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
    return tag(
        "div",
        [tag("div", tag("b", value), tag("span", label), class_="tile") for value, label in facts],
        class_="tiles",
    )


def _notes(figures: CheckpointFigures) -> Element | None:
    lines = [*figures.notes, *_other_errors(figures)]
    fallbacks: dict[str, list[ModuleFigures]] = {}
    for module in figures.modules:
        if module.fallback:
            # The end of the text says what was done; what comes before differs from module to module.
            fallbacks.setdefault(module.fallback.rpartition(": ")[2], []).append(module)
    for what, found in list(fallbacks.items())[:_WORST]:
        more = f" and {len(found) - 1} more modules" if len(found) > 1 else ""
        lines.append(f"Fallback in {found[0].name}{more}: {found[0].fallback if not more else what}")
    bad = [module for module in figures.modules if module.scales.bad]
    lines += [f"{module.name}: {module.scales.bad} scales are NaN or infinite" for module in bad[:_WORST]]
    if not lines:
        return None
    return tag("section", tag("h2", "Worth knowing"), [tag("p", line, class_="warn") for line in lines])


def _other_errors(figures: CheckpointFigures) -> list[str]:
    """A line for each further quantity that errors are of: the page's maps and tables leave those out."""
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


def error_map(figures: CheckpointFigures, ramp: Ramp) -> Element:
    """The errors by projection and block."""
    cells = {}
    for (projection, block), modules in figures.cells().items():
        error = cell_error(modules)
        experts = f", worst of {len(modules)} experts" if len(modules) > 1 else ""
        cells[projection, block] = error, f"block {block}, {projection}: {percent(error)}{experts}"
    picture = heat_map(
        figures.projections, figures.blocks, cells, ramp, f"{figures.error_label} by projection and block"
    )
    return tag("div", picture, class_="scroll")


def _error_section(figures: CheckpointFigures) -> Element | None:
    if not figures.errors:
        return None
    ramp = Ramp.over(figures.errors)
    outside = [module for module in figures.worst if module.block is None]
    return tag(
        "section",
        tag("h2", f"{figures.error_label.capitalize()} of each module"),
        tag(
            "p",
            f"{_meaning(figures)} A column is a decoder block.",
            class_="faint",
        ),
        error_map(figures, ramp),
        legend(ramp, percent(ramp.low), percent(ramp.high)),
        [tag("p", f"{module.name}: {percent(module.error)}") for module in outside[:_WORST]],
    )


def _worst_section(figures: CheckpointFigures) -> Element | None:
    worst = figures.worst[:_WORST]
    if not worst:
        return None
    middle = _medians(figures)
    top = worst[0].error or 1.0
    rows = []
    for module in worst:
        error = module.error or 0.0
        usual = middle[module.projection]
        rows.append(
            tag(
                "tr",
                tag("td", tag("span", class_="meter", style=f"width:{100 * error / top:.0f}px"), class_="m"),
                tag("td", module.name, class_="w"),
                tag("td", percent(error), class_="n"),
                tag("td", f"{error / usual:.1f}×" if usual > 0 else "", class_="n"),
                tag("td", f"{module.in_features} × {module.out_features}", class_="n"),
                tag("td", module.scheme),
            )
        )
    return tag(
        "section",
        tag("h2", "Worst modules"),
        tag(
            "div",
            _table(
                ("", "module", f"{figures.error_label}|", "of its kind's median|", "K × N|", "stored as"),
                rows,
            ),
            class_="scroll",
        ),
    )


def _medians(figures: CheckpointFigures) -> dict[str, float]:
    by_kind: dict[str, list[float]] = {}
    for module in figures.worst:
        by_kind.setdefault(module.projection, []).append(module.error or 0.0)
    return {kind: sorted(errors)[len(errors) // 2] for kind, errors in by_kind.items()}


def _evaluation_section(figures: CheckpointFigures) -> Element | None:
    found = figures.evaluation
    if found is None:
        return None
    measures = [tag("tr", tag("th", label), tag("td", value)) for label, value in found.measures()]
    parts = [_table((), measures)] if measures else []
    if tasks := found.task_rows():
        rows = [
            tag(
                "tr", [tag("td", cell, class_="n" if number > 1 else None) for number, cell in enumerate(row)]
            )
            for row in tasks
        ]
        head = [f"{name}|" if number > 1 else name for number, name in enumerate(TASK_COLUMNS)]
        parts.append(tag("div", _table(head, rows), class_="scroll"))
    return tag("section", tag("h2", "Evaluation"), parts)


def _token_section(figures: CheckpointFigures) -> Element | None:
    seen = [module for module in figures.modules if module.tokens is not None]
    counts = {module.tokens for module in seen}
    if not seen:
        return None
    if len(counts) == 1:
        text = f"Every module saw {counts.pop():,} tokens."
        return tag("section", tag("h2", "Tokens seen"), tag("p", text))
    rows = []
    for projection in dict.fromkeys(module.projection for module in seen):
        tokens = sorted(module.tokens or 0 for module in seen if module.projection == projection)
        starved = sum(1 for count in tokens if count == 0)
        cells = (
            f"{tokens[0]:,}",
            f"{tokens[len(tokens) // 2]:,}",
            f"{tokens[-1]:,}",
            f"{starved:,}" if starved else "",
        )
        rows.append(tag("tr", tag("td", projection), [tag("td", cell, class_="n") for cell in cells]))
    table = _table(("projection", "fewest|", "median|", "most|", "modules that saw none|"), rows)
    return tag("section", tag("h2", "Tokens seen"), tag("div", table, class_="scroll"))


def _time_section(figures: CheckpointFigures) -> Element | None:
    time = figures.time
    if time is None:
        return None
    return tag("section", tag("h2", "Time"), _time(time))


def _time(time: TimeFigures) -> list[Element]:
    ranks = f", {time.ranks} processes" if time.ranks > 1 else ""
    blocks = sorted(time.blocks)
    each = f"; a block took {duration(blocks[len(blocks) // 2])} (median of {len(blocks)})" if blocks else ""
    line = f"{duration(time.total)} on {time.device}{ranks}{each}."
    return [tag("p", line), stack([(name, seconds, duration(seconds)) for name, seconds in time.stages])]


def _size_section(checkpoints: Sequence[CheckpointFigures]) -> Element:
    parts = []
    for label, figures in zip(_labels(checkpoints), checkpoints, strict=True):
        if len(checkpoints) > 1:
            parts.append(tag("h3", label))
        parts.append(stack([(name, count, size(count)) for name, count in figures.sizes.items()]))
    return tag("section", tag("h2", "Size"), parts)


def _recipe_section(checkpoints: Sequence[CheckpointFigures]) -> Element | None:
    sources = [
        {**figures.recipe, **{f"calibration {key}": value for key, value in figures.calibration.items()},
         **figures.environment}
        for figures in checkpoints
    ]  # fmt: skip
    keys = list(dict.fromkeys(key for source in sources for key in source))
    if not keys:
        return None
    rows = []
    for key in keys:
        values = [source.get(key, "") for source in sources]
        differs = "other" if len(set(values)) > 1 else None
        rows.append(tag("tr", tag("th", key), [tag("td", value) for value in values], class_=differs))
    header = ("", *_labels(checkpoints)) if len(checkpoints) > 1 else ()
    return tag("section", tag("h2", "Recipe and environment"), _table(header, rows))


def _kept_section(figures: CheckpointFigures) -> Element | None:
    reasons: dict[str, list[str]] = {}
    for name, reason in figures.kept.items():
        reasons.setdefault(reason, []).append(name)
    if not reasons:
        return None
    rows = []
    for reason, names in list(reasons.items())[:_KEPT]:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        rows.append(
            tag("tr", tag("td", ", ".join(names[:3]) + more), tag("td", reason or "no reason is recorded"))
        )
    return tag("section", tag("h2", "Not quantised"), _table((), rows))


def _comparison(checkpoints: Sequence[CheckpointFigures]) -> list[Element | None]:
    labels = _labels(checkpoints)
    one, other = checkpoints
    rows = [
        ("format", [figures.format for figures in checkpoints]),
        ("size", [size(figures.nbytes) for figures in checkpoints]),
        ("bits per weight", [f"{figures.bits_per_weight:.2f}" for figures in checkpoints]),
        ("quantised linears", [f"{len(figures.modules):,}" for figures in checkpoints]),
        *_error_rows(checkpoints),
        ("worst module", [figures.worst[0].name if figures.worst else "unknown" for figures in checkpoints]),
        ("time", [duration(figures.time.total) if figures.time else "unknown" for figures in checkpoints]),
    ]
    facts = [tag("tr", tag("th", name), [tag("td", value) for value in values]) for name, values in rows]
    return [
        tag(
            "header",
            tag("h1", f"{labels[0]} and {labels[1]}"),
            tag("p", "Two checkpoints side by side", class_="sub"),
        ),
        tag("section", tag("h2", "At a glance"), _table(("", *labels), facts)),
        *[_notes(figures) for figures in checkpoints],
        _two_maps(checkpoints),
        _ratio_section(one, other, labels),
        codes_section(checkpoints, labels),
        scales_section(checkpoints, labels),
        _two_times(checkpoints, labels),
        _size_section(checkpoints),
        _recipe_section(checkpoints),
    ]


def _comparable(checkpoints: Sequence[CheckpointFigures]) -> bool:
    """Whether the errors of all are known and of one quantity."""
    quantities = {figures.quantity for figures in checkpoints}
    return len(quantities) == 1 and None not in quantities


def _error_rows(checkpoints: Sequence[CheckpointFigures]) -> list[tuple[str, list[str]]]:
    """A pair of rows for each quantity: a checkpoint has no figure where its errors are of another."""
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


def _two_maps(checkpoints: Sequence[CheckpointFigures]) -> Element | None:
    known = [figures for figures in checkpoints if figures.errors]
    if not known:
        return None
    together = _comparable(known)
    parts = []
    ramp = Ramp.over([error for figures in known for error in figures.errors])
    for label, figures in zip(_labels(checkpoints), checkpoints, strict=True):
        if not figures.errors:
            continue
        if not together:
            ramp = Ramp.over(figures.errors)
        parts += [tag("h3", label), error_map(figures, ramp)]
        if not together:
            parts.append(legend(ramp, percent(ramp.low), percent(ramp.high)))
            parts.append(tag("p", _meaning(figures), class_="faint"))
    note = (
        f"{_meaning(known[0])} One scale for both."
        if together
        else "The two runs report different quantities, which can't be compared: each map has its own scale."
    )
    return tag(
        "section",
        tag("h2", "Error of each module"),
        tag("p", note, class_="faint"),
        parts,
        legend(ramp, percent(ramp.low), percent(ramp.high)) if together else None,
    )


def _ratio_section(one: CheckpointFigures, other: CheckpointFigures, labels: Sequence[str]) -> Element | None:
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
        f"smaller in {better} of {len(ratios)} places, median {ordered[len(ordered) // 2][1]:.2f}×. "
        "Each run's errors are measured on its own text."
    )

    def listed(entries: Sequence[tuple[tuple[str, int], float]]) -> Element:
        rows = [
            tag("tr", tag("td", f"block {key[1]}, {key[0]}"), tag("td", f"{ratio:.2f}×", class_="n"))
            for key, ratio in entries
        ]
        return _table((), rows)

    return tag(
        "section",
        tag("h2", "What changed"),
        tag("p", text, class_="faint"),
        tag("div", picture, class_="scroll"),
        legend(ramp, f"{ramp.low:.2f}×", f"{ramp.high:.2f}×"),
        tag(
            "div",
            tag("figure", tag("h3", "Falls most"), listed(ordered[:6])),
            tag("figure", tag("h3", "Rises most"), listed(ordered[::-1][:6])),
            class_="pair",
            style="margin-top:14px",
        ),
    )


def _two_times(checkpoints: Sequence[CheckpointFigures], labels: Sequence[str]) -> Element | None:
    parts: list[Element] = []
    for label, figures in zip(labels, checkpoints, strict=True):
        if figures.time is not None:
            parts += [tag("h3", label), *_time(figures.time)]
    return tag("section", tag("h2", "Time"), parts) if parts else None


def _labels(checkpoints: Sequence[CheckpointFigures]) -> list[str]:
    """The names, told apart where they are the same."""
    names = [figures.name for figures in checkpoints]
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _table(header: Sequence[str], rows: Sequence[Element]) -> Element:
    """A table; a title that ends in ``|`` is that of a column of numbers."""
    head = [
        tag("th", title.removesuffix("|"), class_="n" if title.endswith("|") else None) for title in header
    ]
    return tag("table", tag("thead", tag("tr", head)) if header else None, tag("tbody", rows))


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
    """Seconds as people say them."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 100:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{seconds:.3g} s"


def _grouped(text: str) -> str:
    return f"{int(text):,}" if text.isascii() and text.isdigit() and len(text) < 16 else text
