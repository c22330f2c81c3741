"""Ten cases of the campaign, and ninety where it may be slow; ``make fuzz`` runs ten thousand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from marlinq.checkpoint import Checkpoint
from marlinq.checkpoint import source as source_module
from marlinq.operations.inspect import inspect_checkpoint
from marlinq.operations.verify import verify_checkpoint as verify_operation
from marlinq.operations.verify.verification_report import Check
from tests.fuzz.campaign import AREAS, Campaign
from tests.fuzz.mutations import MARKER
from tests.testing.pairs import slow_but

SEED = 20_261


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    return Campaign(tmp_path_factory.mktemp("campaign"), seed=SEED, apart_every=0)


@pytest.mark.parametrize("part", slow_but(range(10), 0))
def test_no_case_breaks_a_promise(campaign: Campaign, part: int) -> None:
    for number in range(10 * part, 10 * part + 10):
        campaign.case(number)
    assert not campaign.tally.findings, campaign.tally.render()


def kinds(campaign: Campaign, area: str, cases: int = 12) -> set[str]:
    """Findings of ``cases`` cases of one area."""
    first = AREAS.index(area)
    before = len(campaign.tally.findings)
    for number in range(first, first + cases * len(AREAS), len(AREAS)):
        campaign.case(number)
        shutil.rmtree(campaign.scratch / f"case-{number}", ignore_errors=True)
    found = {finding.kind for finding in campaign.tally.findings[before:]}
    del campaign.tally.findings[before:]
    return found


def test_the_campaign_sees_a_source_that_changes(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module.SourceFile, "check_content", lambda self: None)
    monkeypatch.setattr(Checkpoint, "check_unchanged", lambda self: None)
    assert "wrong" in kinds(campaign, "race")


def test_the_campaign_sees_a_changed_byte_that_passes(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blind(checkpoint: Checkpoint, report_progress: object) -> Check:
        return Check("manifest", "passed", "")

    monkeypatch.setattr(verify_operation, "check_manifest", blind)
    assert "wrong" in kinds(campaign, "tensors", cases=3)


def test_the_campaign_sees_a_verdict_that_is_not_what_load_does(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect_checkpoint, "build_refusal", lambda checkpoint, quantized: None)
    assert "wrong" in kinds(campaign, "tokenizer", cases=3)


def test_the_campaign_sees_a_traceback(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, *args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("marlinq.checkpoint.reader.read_header", broken)
    assert kinds(campaign, "header", cases=1) == {"traceback"}


def test_the_campaign_sees_code_that_runs(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(folder: Path) -> list[str]:
        (Path(folder).parent / MARKER).touch()
        return []

    monkeypatch.setattr("marlinq.checkpoint.reader._side_files", runs)
    assert "executed" in kinds(campaign, "place", cases=4)
