"""The tokenizer that a recipe's chat template is put into."""

from __future__ import annotations

from pathlib import Path

import pytest

from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.operations.quantize.chat_template import own_tokenizer
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.runnable_folders import save_tokenizer


def test_a_model_without_the_template_that_is_asked_for(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(UnsupportedError, match=r"chat_template model: .* no chat template"):
        own_tokenizer(tmp_path, Recipe(chat_template="model"), trust_remote_code=False)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    made = own_tokenizer(tmp_path, Recipe(chat_template=str(template)), trust_remote_code=False)
    assert made.chat_template == "{{ messages }}"


@pytest.mark.parametrize("text", ["{% if", "{{ raise_exception('no users') }}", "{{ messages[9].content }}"])
def test_a_template_that_fails_is_named_by_its_own_file(tmp_path: Path, text: str) -> None:
    save_tokenizer(tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text(text)
    with pytest.raises(CheckpointError, match=r"^chat_template \S+template\.jinja: .* can't be rendered"):
        own_tokenizer(tmp_path, Recipe(chat_template=str(template)), trust_remote_code=False)
