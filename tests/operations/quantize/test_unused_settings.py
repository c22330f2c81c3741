"""Settings that do nothing are named, with the setting that is why."""

from __future__ import annotations

import re

import pytest

from marlinq.core.errors import UsageError
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.unused_settings import unused_settings


@pytest.mark.parametrize(
    ("settings", "sentences"),
    [
        ({}, []),
        ({"samples": 4, "tune_steps": 2, "tune_codes": True, "damp": 0.1}, []),
        ({"method": "rtn", "samples": 4, "chat_template": "model"}, ["samples, chat_template: .* rtn reads"]),
        ({"method": "rtn", "samples": 4, "tune_steps": 2}, []),
        ({"method": "rtn", "samples": 4, "target_bits": 5, "format": "compressed-tensors"}, []),
        ({"tune_codes": True, "tune_norms": False}, ["tune_codes, tune_norms: .* tune_steps is 0"]),
        ({"quality": "best", "tune_steps": 0}, []),
        ({"quality": "best", "tune_steps": 0, "tune_rate": 0.1}, ["tune_rate: .* tune_steps is 0"]),
        (
            {"scheme": "fp8", "format": "compressed-tensors", "damp": 0.1, "seed": 3},
            ["damp: .* made by rtn"],
        ),
        (
            {"scheme": "fp8", "format": "compressed-tensors", "quality": "fast", "method": "gptq"},
            ["method: .* made by rtn"],
        ),
        ({"scheme": "fp8", "format": "compressed-tensors", "quality": "fast"}, []),
        ({"method": "rtn", "samples": 4, "overrides": [{"match": "x", "scheme": "int8"}]}, ["samples: "]),
        (
            {
                "scheme": "fp8",
                "format": "compressed-tensors",
                "samples": 4,
                "overrides": [{"match": "x", "scheme": "int4"}],
            },
            [],
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) or "none",
)
def test_settings_that_do_nothing_are_named(settings: dict[str, object], sentences: list[str]) -> None:
    found = unused_settings(Recipe.from_dict(settings))
    assert len(found) == len(sentences), found
    for sentence, expected in zip(found, sentences, strict=True):
        assert re.match(expected, sentence), sentence


@pytest.mark.parametrize(
    ("scheme", "formats"),
    [("fp8", "compressed-tensors"), ("nvfp4", "compressed-tensors or modelopt")],
)
def test_a_scheme_that_the_format_lacks_names_formats_that_hold_it(scheme: str, formats: str) -> None:
    with pytest.raises(UsageError, match=rf"gptq holds int4 and int8 only; choose format {formats}$"):
        Recipe(scheme=scheme)
