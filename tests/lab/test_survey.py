"""The page of models is the recorded survey, and a sample of families still does what was recorded."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from lab.models import survey
from lab.models.families import Family, families
from lab.models.survey import PAGE, RESULTS, WORKS, Row, examine, key_of, page, read_rows, worse
from tests.testing.pairs import slow_but

SAMPLE = ("qwen3_5_text", "afmoe", "qwen2_5_vl", "llava")


def test_the_page_shows_the_recorded_rows() -> None:
    version = json.loads(RESULTS.read_text())["transformers"]
    assert PAGE.read_text() == page(list(read_rows().values()), version)


@pytest.mark.parametrize("model_type", slow_but(SAMPLE, "qwen3_5_text", "llava"))
def test_a_family_that_worked_still_works(model_type: str) -> None:
    family = next(each for each in families() if each.model_type == model_type)
    before = read_rows()
    assert before[key_of(family)].outcome == WORKS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = examine(family)
    assert not worse(before, {key_of(family): row})


def test_a_family_that_turns_from_works_to_refused_is_named() -> None:
    works = Row("llama", "LlamaForCausalLM", False, WORKS)
    refused = Row("llama", "LlamaForCausalLM", False, "refused", "no such thing")
    assert worse({"llama": works}, {"llama": refused}) == ["llama: refused: no such thing"]
    assert not worse({"llama": refused}, {"llama": works})


def test_rows_of_a_run_that_is_ended_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = [Family(name, "Model", wrapper=False) for name in ("first", "second", "third")]
    ends = ["third"]

    def examined(family: Family) -> Row:
        if family.model_type in ends:
            raise KeyboardInterrupt
        return Row(family.model_type, family.architecture, family.wrapper, WORKS)

    monkeypatch.setattr(survey, "families", lambda: iter(known))
    monkeypatch.setattr(survey, "examine", examined)
    monkeypatch.setattr(survey, "RESULTS", tmp_path / "survey.json")
    monkeypatch.setattr(survey, "PAGE", tmp_path / "models.md")
    with pytest.raises(KeyboardInterrupt):
        survey.main([])
    assert [row.model_type for row in read_rows().values()] == ["first", "second"]
    ends[:] = ["first", "second"]
    assert survey.main(["--from", "third"]) == 0
    assert [row.model_type for row in read_rows().values()] == ["first", "second", "third"]
    assert "3 of 3" in (tmp_path / "models.md").read_text()
