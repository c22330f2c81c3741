"""Fifty cases of the second campaign, and whether it sees what it looks for; ``make fuzz`` runs 5,000."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from marlinq.kernels.driver import cache
from tests.fuzz.surfaces import Surfaces, _Case, on_a_local_hub
from tests.testing.hub_server import Lie

# A minute of 2 cores: left to `make test-all` and `make fuzz`.
pytestmark = pytest.mark.slow

SEED = 20_262


@pytest.fixture(scope="module")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Surfaces]:
    with on_a_local_hub() as hub:
        yield Surfaces(tmp_path_factory.mktemp("surfaces"), hub, seed=SEED)


@pytest.mark.parametrize("part", range(5))
def test_no_case_breaks_a_promise(surfaces: Surfaces, part: int) -> None:
    for number in range(10 * part, 10 * part + 10):
        surfaces.case(number)
    assert not surfaces.tally.findings, surfaces.tally.render()


def kinds(surfaces: Surfaces, area: str, cases: int) -> set[str]:
    """What ``cases`` cases of one area find."""
    first, step = surfaces.AREAS.index(area), len(surfaces.AREAS)
    before = len(surfaces.tally.findings)
    for number in range(first, first + cases * step, step):
        surfaces.case(number)
    found = {finding.kind for finding in surfaces.tally.findings[before:]}
    del surfaces.tally.findings[before:]
    return found


def test_the_campaign_sees_formulas(surfaces: Surfaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlinq.operations.report.tables._FORMULA", ("never",))
    assert "wrong" in kinds(surfaces, "report", 10)


def test_the_campaign_sees_a_cache_that_is_believed(
    surfaces: Surfaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def believing(path: Path) -> object:
        return (
            cache._Entry(**json.loads(path.read_bytes()))
            if path.is_file() and path.stat().st_size < 1_000
            else None
        )

    monkeypatch.setattr(cache, "_read", believing)
    assert "wrong" in kinds(surfaces, "cache", 90)


def test_the_campaign_sees_a_server_that_is_believed(
    surfaces: Surfaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(case: _Case) -> Lie:
        return Lie(headers={"ETag": f'"{case.home}/written"'})

    monkeypatch.setattr("marlinq.core.hub_answers._ETAG", re.compile(".*"))
    monkeypatch.setattr(_Case, "lie", elsewhere)
    assert "dirt" in kinds(surfaces, "hub", 10)
