"""A processor stands in for every one with fewer instructions, and for none with more."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "other_processors.py"))


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        (set(), ["default"]),
        ({"avx2"}, ["default", "avx2"]),
        ({"avx2", "avx512bw"}, ["default", "avx2", "avx512"]),
    ],
)
def test_environments(flags: set[str], levels: list[str]) -> None:
    found = script["environments"](flags)
    assert [environment["ATEN_CPU_CAPABILITY"] for environment in found] == levels
    assert {environment["OMP_NUM_THREADS"] for environment in found} <= {"1", "2"}


def test_tests_of_the_script_exist() -> None:
    for test in script["_TESTS"]:
        path, _, name = test.partition("::")
        assert f"def {name or 'test_'}" in (Path(__file__).parents[2] / path).read_text()
