"""The tables of docs/formats.md that say what holds a scheme and what becomes another, from the code itself.

``python -m tests.docs.test_format_tables`` prints them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.core.schemes import SCHEMES
from marlinq.formats import FORMATS
from marlinq.operations.convert.recast import recast

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
CT = FORMATS["compressed-tensors"]
INTEGERS = [name for name, named in SCHEMES.items() if named.element.table is None]


def example(name: str) -> Scheme:
    """A scheme as compressed-tensors stores it, in groups of 128 where its name leaves them open."""
    named = SCHEMES[name]
    scheme = named.example(Scheme(named.element, Granularity.group(128), "midpoint"))
    return CT.layout_of(scheme).as_stored(scheme)


def _head(corner: str, names: Iterable[str]) -> list[str]:
    cells = [corner, *(f"`{name}`" for name in names)]
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def holders() -> str:
    """Which schemes each format is written with."""
    # Formats of sparse weights are a section of their own.
    forms = [form for form in FORMATS.values() if form.read_only is None and form.sparsity is None]
    lines = ["| format | schemes |", "|---|---|"]
    for form in forms:
        held = [
            f"`{name}`"
            for name, named in SCHEMES.items()
            if form.scheme_refusal(named.example(example(name))) is None
        ]
        lines.append(f"| `{form.name}` | {'all' if len(held) == len(SCHEMES) else ', '.join(held)} |")
    return "\n".join(lines)


def pairs() -> str:
    """What ``convert --scheme`` does between schemes of floats, from that of a row to that of a column."""
    floats = [name for name in SCHEMES if name not in INTEGERS]
    lines = _head("from / to", floats)
    for source in floats:
        cells = [_pair(source, target) for target in floats]
        lines.append(f"| `{source}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(source: str, target: str) -> str:
    way = recast(example(source), CT.layout_of(example(target)), SCHEMES[target])
    if way is None:
        return "same"
    if isinstance(way, str):
        return "never"
    if not way.refusal:
        return "exact"
    return "rounds" if "rounded again" in way.refusal else "exact or refused"


def test_nothing_else_becomes_integers_nor_integers_anything_else() -> None:
    ways = {(a, b): _pair(a, b) for a in SCHEMES for b in SCHEMES if a != b and {a, b} & set(INTEGERS)}
    assert set(ways.values()) == {"never"}


def test_the_tables_are_in_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for table in (holders(), pairs()):
        assert table in page, f"docs/formats.md: put this table in:\n{table}"


if __name__ == "__main__":
    print(holders(), pairs(), sep="\n\n")
