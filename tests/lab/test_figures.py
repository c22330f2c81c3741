"""Tables and plots of the documentation are those of the result files."""

from __future__ import annotations

from lab import figures


def test_pages_and_plots_are_up_to_date() -> None:
    stale = [
        str(path)
        for path, text in figures.wanted().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run: python -m lab.figures"


def test_every_table_has_its_place() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in figures.PAGES)
    for name, table in figures.TABLES.items():
        assert f"<!-- table: {name} -->\n{table()}\n<!-- end -->" in pages, name


def test_ratios_are_those_of_the_times() -> None:
    found = {
        "batches": [1, 1024],
        "shapes": {"a": [1000, 1000], "b": [2000, 1000]},
        "cold_read_us": {"a": 2.0, "b": 4.0},
        "peak_tflops": 500,
        "microseconds": {"a": {"x": [4.0, 8.192]}, "b": {"x": [4.0, 8.192]}},
    }
    # At batch 1 the read is the floor (ratios 2 and 1), at 1024 the arithmetic (4.096 and 8.192 us).
    small, large = figures.over_floor(found)["x"]
    assert abs(small - 2**0.5) < 1e-12
    assert abs(large - 2**0.5) < 1e-12
