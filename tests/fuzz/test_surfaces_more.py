"""Fifty more cases of the second campaign, which another worker runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz.surfaces import RANKS_EVERY, Surfaces, on_a_local_hub
from tests.fuzz.test_surfaces import SEED

# A minute of 2 cores: left to `make test-all` and `make fuzz`.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surfaces]:
    with on_a_local_hub() as hub:
        yield Surfaces(tmp_path_factory.mktemp("surfaces"), hub, seed=SEED)


@pytest.mark.parametrize("part", range(5, 10))
def test_no_case_breaks_a_promise(surfaces: Surfaces, part: int) -> None:
    for number in range(10 * part, 10 * part + 10):
        # Two ranks take too long here; tests/operations/quantize/test_ranks.py kills some.
        if number % RANKS_EVERY != RANKS_EVERY - 1:
            surfaces.case(number)
    assert not surfaces.tally.findings, surfaces.tally.render()
