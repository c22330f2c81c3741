"""A draft head that is right with a known chance, on a CPU."""

from __future__ import annotations

from pathlib import Path

from lab.runtime.draft_speed import measure
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model


def test_drafts_are_right_as_often_as_was_asked(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=300)
    save_plain(tmp_path, model)
    save_tokenizer(tmp_path, model)
    always, never = measure(tmp_path, (1.0, 0.0), count=24, device="cpu")
    assert always[1].drafts.accepted == always[1].drafts.drafted > 0
    assert never[1].drafts.accepted == 0
