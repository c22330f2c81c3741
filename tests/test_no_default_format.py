"""No argument and no field has an element, a granularity or a scheme as its default."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import marlinq

ROOMS = ("core", "formats", "checkpoint", "methods", "kernels", "runtime")
"""Rooms that are held to it."""

FORMATS = {"INT4", "INT8", "E4M3", "E2M1", "Granularity", "Scheme", "KERNEL_FORMAT"}


def defaults(tree: ast.AST) -> Iterator[ast.expr]:
    """Default values of arguments, and of fields that are annotated in a class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from node.args.defaults
            yield from (value for value in node.args.kw_defaults if value is not None)
        elif isinstance(node, ast.ClassDef):
            yield from (
                statement.value
                for statement in node.body
                if isinstance(statement, ast.AnnAssign) and statement.value is not None
            )


def formats_in(text: str) -> list[str]:
    """Names of formats among the defaults of a source."""
    return [
        name.id
        for value in defaults(ast.parse(text))
        for name in ast.walk(value)
        if isinstance(name, ast.Name) and name.id in FORMATS
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_no_format_is_a_default(room: str) -> None:
    files = sorted((Path(marlinq.__file__).parent / room).rglob("*.py"))
    assert files
    found = {file.name: names for file in files if (names := formats_in(file.read_text("utf-8")))}
    assert found == {}


def test_formats_in_defaults_are_found() -> None:
    assert formats_in("def f(x, element=INT4): ...") == ["INT4"]
    assert formats_in("class A:\n    shared: Granularity = Granularity.group(128)\n") == ["Granularity"]
    assert formats_in("def f(element: Element, shared: Granularity | None = None): ...") == []
