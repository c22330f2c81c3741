"""Reports show themselves as text, to print and in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from marlinq.core.display import Block, Shown, counted, lines


@dataclass(frozen=True)
class Report(Shown):
    figures: tuple[int, ...]

    def display(self) -> Sequence[Block]:
        return [lines(f"{len(self.figures)} figures")]


def test_print_and_notebooks_show_the_text_and_not_every_field() -> None:
    class Printer:
        said = ""

        def text(self, text: str) -> None:
            self.said += text

    report, printer = Report((1, 2)), Printer()
    report._repr_pretty_(printer, False)
    assert str(report) == printer.said == report.render() == "2 figures"


def test_one_is_followed_by_a_singular() -> None:
    for number, expected in {0: "0 tokens", 1: "1 token", 2: "2 tokens"}.items():
        assert counted(number, "tokens") == expected
    assert counted(1, "other files") == "1 other file"
