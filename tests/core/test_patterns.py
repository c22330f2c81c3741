"""Patterns from outside: what Python's ``re`` finds, in bounded time and memory."""

from __future__ import annotations

import re
import time

import pytest

from marlinq.core import patterns
from marlinq.core.errors import CheckpointError, UsageError
from marlinq.core.patterns import Patterns

NAMES = ["model.layers.0.mlp.up_proj", "model.layers.17.self_attn.q_proj", "lm_head", ""]
HONEST = [
    r".*\.(?:mlp|attn)",
    r"^model\.layers\.\d{1,2}\.",
    r"(?!.*lm_head)",
    r"layers\.(?:[0-9]|1[0-7])\.mlp",
    r"q_proj$",
    "",
]


@pytest.mark.parametrize("text", HONEST)
def test_honest_patterns_find_what_re_finds(text: str) -> None:
    pattern = Patterns("here").compile(text)
    for name in NAMES:
        assert pattern.matches(name) == (re.match(text, name) is not None)
        assert pattern.found_in(name) == (re.search(text, name) is not None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("(", "not a regular expression"),
        ("(" * 2000 + ")" * 2000, "not a regular expression"),
        ("a{5000000000000}", "copies"),
        ("a{99999999999,}", "copies"),
        ("a{0,99999999999}", "not a regular expression"),
        ("a" * 10_001, "10001 characters, at most 10000"),
        ("(?:a{1000}){1000}", "1e+06 copies, at most 256"),
        ("(" * 14 + "a" + "){2}" * 14, "copies"),
        ("(?x)a{# }\n100000}", "verbose"),
    ],
)
def test_bad_patterns_are_refused_at_once(text: str, says: str) -> None:
    start = time.monotonic()
    with pytest.raises(UsageError) as caught:
        Patterns("--override", UsageError).compile(text)
    assert time.monotonic() - start < 1
    message = str(caught.value)
    assert message.startswith("--override: pattern ")
    assert says in message
    assert "\n" not in message
    assert len(message) < 400


def test_a_match_has_a_limit_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MATCH_SECONDS", 0.05)
    pattern = Patterns("config.json").compile(r"(?:[a-z.]|.)+[0-9]")
    with pytest.raises(CheckpointError, match=r"config\.json: pattern .* takes too long to match 'model"):
        pattern.matches("model.decoder.blocks.attention.projection.query" * 3)
    with pytest.raises(CheckpointError, match="too long to be matched"):
        pattern.matches("a" * 10_001)


def test_all_patterns_of_a_source_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TOTAL_SECONDS", 0.0)
    exhausted = Patterns("config.json").compile("q_proj")
    with pytest.raises(CheckpointError, match="'q_proj' takes too long to match"):
        exhausted.found_in("q_proj")
    source = Patterns("config.json")
    source.seconds_left = 1.0
    source.compile("(?:[a-z]|.)+[0-9]").matches("a" * 20)
    assert source.seconds_left < 1.0
