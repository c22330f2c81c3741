"""The page of models is the recorded survey, and a sample of families still does what was recorded."""

from __future__ import annotations

import json
import warnings

import pytest

from lab.models.families import families
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
