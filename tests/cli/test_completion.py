"""Completions that a shell offers after a tab."""

from __future__ import annotations

import pytest
from click.shell_completion import ShellComplete

from marlinq.cli import cli
from marlinq.formats import FORMATS


def offered(*arguments: str, incomplete: str = "") -> set[tuple[str, str]]:
    completion = ShellComplete(cli, {}, "marlinq", "_MARLINQ_COMPLETE")
    return {(item.value, item.type) for item in completion.get_completions(list(arguments), incomplete)}


@pytest.mark.parametrize(
    ("arguments", "incomplete", "expected"),
    [
        ((), "qua", {("quantize", "plain")}),
        (("convert", "a", "b", "--to"), "compressed", {("compressed-tensors", "plain")}),
        (("convert", "a", "b", "--to"), "den", {("dense", "plain")}),
        (("quantize", "a", "b", "--quality"), "be", {("best", "plain")}),
        (("quantize", "a", "b", "--group-size"), "a", {("auto", "plain")}),
        (("quantize", "a", "b", "--calibration"), "se", {("self", "plain"), ("se", "file")}),
        (("no-such-command", "x"), "qua", {("quantize", "plain")}),
        (("verify",), "mo", {("mo", "dir")}),
        (("generate", "x", "--dtype"), "bf", {("bfloat16", "plain")}),
    ],
)
def test_values_are_completed(
    arguments: tuple[str, ...], incomplete: str, expected: set[tuple[str, str]]
) -> None:
    assert offered(*arguments, incomplete=incomplete) == expected


def test_every_format_is_offered() -> None:
    assert {value for value, _ in offered("quantize", "a", "b", "--format")} == set(FORMATS)
