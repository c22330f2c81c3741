"""Fifty cases of the second campaign, and whether it sees what it looks for; ``make fuzz`` runs 5,000."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from marlinq.kernels.driver import cache
from marlinq.operations.verify.verification_report import MANIFEST_CHECK, Check
from tests.fuzz import campaign, operations
from tests.fuzz.surfaces import RANKS_EVERY, Surfaces, _Case, on_a_local_hub
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


def finds(surfaces: Surfaces, area: str, kind: str, cases: int) -> bool:
    """Whether one of the first ``cases`` cases of an area ends in a finding of a kind."""
    first, step = surfaces.AREAS.index(area), len(surfaces.AREAS)
    before = len(surfaces.tally.findings)
    for number in range(first, first + cases * step, step):
        if number % RANKS_EVERY != RANKS_EVERY - 1:
            surfaces.case(number)
        if any(finding.kind == kind for finding in surfaces.tally.findings[before:]):
            break
    found = {finding.kind for finding in surfaces.tally.findings[before:]}
    del surfaces.tally.findings[before:]
    return kind in found


def test_the_campaign_sees_formulas(surfaces: Surfaces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlinq.operations.report.tables._FORMULA", ("never",))
    assert finds(surfaces, "report", "wrong", 10)


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
    assert finds(surfaces, "cache", "wrong", 90)


def test_the_campaign_sees_a_server_that_is_believed(
    surfaces: Surfaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(case: _Case) -> Lie:
        return Lie(headers={"ETag": f'"{case.home}/written"'})

    monkeypatch.setattr("marlinq.core.hub_answers._ETAG", re.compile(".*"))
    monkeypatch.setattr(_Case, "lie", elsewhere)
    assert finds(surfaces, "hub", "dirt", 10)


def _believed(checkpoint: Any, progress: Any) -> Check:
    return Check(MANIFEST_CHECK, "passed", "")


def _never_returns(*arguments: Any, **options: Any) -> None:
    while True:
        time.sleep(0.01)


def _with_functions(data: bytes) -> Any:
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda loader, node: f"!function {node.value}")
    try:
        return yaml.load(data, loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError from error


@pytest.mark.parametrize(
    ("area", "kind", "place", "fault"),
    [
        (
            "allocation",
            "traceback",
            "quantize.allocation.stored_allocation._check_numbers",
            lambda values: None,
        ),
        ("allocation", "wrong", "quantize.allocation.sizes.Frame.budget", lambda frame, recipe: 1 << 62),
        ("allocation", "hang", "quantize.prepare.check_allocation", _never_returns),
        (
            "sparse",
            "traceback",
            "verify.verify_checkpoint.check_manifest",
            lambda checkpoint, progress: 1 / 0,
        ),
        ("sparse", "wrong", "verify.verify_checkpoint.check_manifest", _believed),
        ("sparse", "hang", "verify.verify_checkpoint.check_manifest", _never_returns),
        ("recommend", "traceback", "recommend.shape._check_counts", lambda name, config: config[0]),
        ("recommend", "wrong", "recommend.step_times.memory", lambda shape, weights, rows, tokens: -1.0),
        ("recommend", "hang", "recommend.recommend_weights.read_config", _never_returns),
        ("tasks", "traceback", "evaluate.tasks.task_files.load_yaml", lambda data: yaml.safe_load(b"{")),
        ("tasks", "wrong", "evaluate.tasks.task_files.load_yaml", _with_functions),
        ("tasks", "hang", "evaluate.tasks.task_files.load_yaml", _never_returns),
    ],
)
def test_the_campaign_sees_faults_of_operations(
    surfaces: Surfaces, monkeypatch: pytest.MonkeyPatch, area: str, kind: str, place: str, fault: Any
) -> None:
    monkeypatch.setattr(f"marlinq.operations.{place}", fault)
    if kind == "hang":
        limited = partial(campaign.limited, 3.0)
        for module in (campaign, operations):
            monkeypatch.setattr(module, "limited", limited)
    assert finds(surfaces, area, kind, 60)
