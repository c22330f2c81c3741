"""The tables of docs/formats.md that say what holds a scheme and what becomes another, from the code itself.

``python -m tests.docs.test_format_tables`` prints them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from marlinq.core.granularity import Granularity
from marlinq.core.scheme import Scheme
from marlinq.core.schemes import SCHEMES
from marlinq.formats import FORMATS
from marlinq.operations.convert.recast import recast
from marlinq.operations.inspect.servers import Server, servers

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
CT = FORMATS["compressed-tensors"]
INTEGERS = [name for name, named in SCHEMES.items() if named.element.table is None]


def example(name: str) -> Scheme:
    """A scheme as compressed-tensors stores it, in groups of 128 where its name leaves them open."""
    named = SCHEMES[name]
    scheme = named.example(Scheme(named.element, Granularity.group(128), "midpoint"))
    return CT.layout_of(scheme).as_stored(scheme)


def holders() -> str:
    """Which schemes each format is written with, and which of them servers load."""
    # Formats of sparse weights are a section of their own.
    forms = [form for form in FORMATS.values() if form.read_only is None and form.sparsity is None]
    judges = [server for server in servers() if server.name in ("vLLM", "SGLang", "transformers")]
    lines = ["| format | schemes | " + " | ".join(server.name for server in judges) + " |", "|---" * 5 + "|"]
    for form in forms:
        held = [
            name
            for name, named in SCHEMES.items()
            if form.scheme_refusal(named.example(example(name))) is None
        ]
        cells = ["all" if len(held) == len(SCHEMES) else _listed(held)]
        cells += [_share(held, loaded_by(server, form.name)) for server in judges]
        lines.append(f"| `{form.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def loaded_by(server: Server, form: str) -> set[str]:
    """Schemes of a format that a server loads under some settings."""
    floats = {name for each in server.floats if form in each.names for name in each.schemes}
    weights = {weight for each in server.formats if form in each.names for weight in each.weights}
    return floats | {weight.split()[0] for weight in weights}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _share(held: Sequence[str], loaded: Collection[str]) -> str:
    """Which of a format's schemes a server loads, in few words."""
    taken, left = ([name for name in held if (name in loaded) == wanted] for wanted in (True, False))
    if not left or not taken:
        return "all" if taken else "none"
    return _listed(taken) if len(taken) <= len(left) else f"all but {_listed(left)}"


def pairs() -> str:
    """What ``convert --scheme`` does between schemes of floats, from that of a row to that of a column.

    Schemes that are exact in each other share a row and a column.
    """
    floats = [name for name in SCHEMES if name not in INTEGERS]
    alike = {(one, other) for one in floats for other in floats if _both_exact(one, other)}
    groups = list(dict.fromkeys(tuple(b for b in floats if (a, b) in alike or a == b) for a in floats))
    names = [", ".join(f"`{name}`" for name in group) for group in groups]
    lines = [f"| from / to | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for row, sources in zip(names, groups, strict=True):
        cells = []
        for targets in groups:
            found = {_pair(one, other) for one in sources for other in targets if one != other} or {"same"}
            (cell,) = found
            cells.append(cell)
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _both_exact(one: str, other: str) -> bool:
    return one != other and {_pair(one, other), _pair(other, one)} == {"exact"}


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
