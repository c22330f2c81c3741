"""Doors between rooms go downward only, function-level imports included (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "marlinq"

FLOORS = (
    ("core",),
    ("formats",),
    ("checkpoint",),
    ("models", "calibration", "methods", "kernels"),
    ("runtime",),
    ("operations", "integrations"),
    ("cli",),
)
"""Rooms from the ground up. A room sees the floors below it."""
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
KERNEL_FLOORS = (
    ("contract",),
    ("driver",),
    ("variants",),
    ("choose",),
    ("launch",),
    ("ops", "experts", "solve", "step"),
)
"""Rooms of ``marlinq.kernels`` from the ground up."""
KERNEL_HEIGHT = {room: height for height, rooms in enumerate(KERNEL_FLOORS) for room in rooms}
KERNEL_NEIGHBOURS = {("experts", "ops")}
"""Doors on one floor of the kernels: (who imports, from where)."""
NEIGHBOURS = {("methods", "kernels")}
"""Doors on one floor: (who imports, from where)."""
OPERATIONS_SHARED = {
    ("convert", "inspect"),
    ("quantize", "report"),
    ("quantize", "inspect"),
    ("evaluate", "report"),
    *(("recommend", other) for other in ("bench", "evaluate", "inspect", "report")),
}
"""Doors between operations: (who imports, from where)."""


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
    return {name for name in found if name == "marlinq" or name.startswith("marlinq.")}


def imported_modules(path: Path, known: Collection[str]) -> set[str]:
    """Modules of the package that a file imports, or names of which it imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in known else node.module for name in whole}
    return found & set(known)


def room(module: str) -> str | None:
    """The room of a module; None for the package's own face (marlinq, marlinq.__main__)."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and not parts[1].startswith("__") else None


def test_every_room_stands_in_the_plan() -> None:
    assert {found for name, _ in modules() if (found := room(name)) is not None} == set(HEIGHT)


@pytest.mark.parametrize(("name", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_imports_go_down(name: str, path: Path) -> None:
    mine = room(name)
    if mine is None:
        return
    for other in imports(path):
        theirs = room(other)
        if theirs is None or theirs == mine:
            continue
        down = HEIGHT[theirs] < HEIGHT[mine] or (mine, theirs) in NEIGHBOURS
        assert down, f"{name} imports {other}: {mine} may not see {theirs}"


def test_every_room_of_the_kernels_stands_in_the_plan() -> None:
    rooms = {path.name for path in (PACKAGE / "kernels").iterdir() if path.is_dir()}
    assert rooms - {"cuda", "__pycache__"} == set(KERNEL_HEIGHT)


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, path) for name, path in modules() if name.startswith("marlinq.kernels.")],
)
def test_imports_of_the_kernels_go_down(name: str, path: Path) -> None:
    mine = name.split(".")[2]
    for other in imports(path):
        parts = other.split(".")
        if parts[1:2] != ["kernels"] or parts[2:3] == [mine]:
            continue
        assert len(parts) > 2, f"{name} imports the face of the kernels, which stands above it"
        theirs = parts[2]
        down = KERNEL_HEIGHT[theirs] < KERNEL_HEIGHT[mine] or (mine, theirs) in KERNEL_NEIGHBOURS
        assert down, f"{name} imports {other}: {mine} may not see {theirs}"


def test_no_imports_run_in_a_circle() -> None:
    """Nor those that a type checker alone follows: modules that need each other are one module."""
    paths = dict(modules())
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, path in paths.items():
        sorter.add(name, *(imported_modules(path, paths) - {name}))
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


@pytest.mark.parametrize(
    ("name", "path"), [(name, path) for name, path in modules() if name.startswith("marlinq.operations.")]
)
def test_operations_keep_to_themselves(name: str, path: Path) -> None:
    mine = name.split(".")[2]
    for_all = {each.stem for each in (PACKAGE / "operations").glob("*.py")}
    for other in imports(path):
        parts = other.split(".")
        if parts[1:2] == ["operations"] and len(parts) > 2 and parts[2] not in (mine, *for_all):
            assert (mine, parts[2]) in OPERATIONS_SHARED, f"{name} imports {other}"
