"""The tokenizer that a recipe's chat template is put into."""

from __future__ import annotations

from pathlib import Path

import pytest

from marlinq.core.errors import UnsupportedError
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
