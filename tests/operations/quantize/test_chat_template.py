"""The tokenizer that a recipe's chat template is put into."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marlinq.calibration import Document
from marlinq.calibration.documents import Duplicates
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.calibration_text import text_from_outside
from marlinq.operations.quantize.chat_template import own_tokenizer
from marlinq.operations.quantize.planned_text import SourcePart
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model


def test_a_model_without_the_template_that_is_asked_for(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    with pytest.raises(UnsupportedError, match=r"chat_template model: .* no chat template"):
        own_tokenizer(tmp_path, Recipe(chat_template="model"), trust_remote_code=False)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    made = own_tokenizer(tmp_path, Recipe(chat_template=str(template)), trust_remote_code=False)
    assert made.chat_template == "{{ messages }}"


NEEDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
FAILS_WHERE_AN_ANSWER_BEGINS = (
    "{{ messages }}{% if add_generation_prompt %}{{ raise_exception('no') }}{% endif %}"
)


@pytest.mark.parametrize(
    "text", ["{% if", NEEDS_SYSTEM, "{{ messages[9].content }}", FAILS_WHERE_AN_ANSWER_BEGINS]
)
def test_a_template_for_text_of_the_model_itself_is_named_by_its_file(tmp_path: Path, text: str) -> None:
    save_plain(tmp_path / "model", tiny_model("llama"))
    save_tokenizer(tmp_path / "model")
    template = tmp_path / "template.jinja"
    template.write_text(text)
    recipe = Recipe(calibration=("self",), chat_template=str(template), samples=2, max_length=24)
    with pytest.raises(CheckpointError, match=r"^chat_template \S+template\.jinja: .* can't be rendered"):
        quantize(tmp_path / "model", tmp_path / "out", recipe=recipe, device="cpu")


def test_a_template_is_judged_by_the_conversations_that_it_renders(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text(NEEDS_SYSTEM)
    recipe = Recipe(chat_template=str(template), group_size=32)
    text = tmp_path / "chats.jsonl"
    messages = [{"role": "system", "content": "abcdefgh"}, {"role": "user", "content": "ijklmnop"}]

    def read() -> list[Document]:
        return text_from_outside(
            SourcePart(str(text), recipe.replace(samples=2), None),
            tmp_path,
            tiny_model("llama").config,
            max_length=24,
            duplicates=Duplicates(),
            trust_remote_code=False,
        )

    text.write_text(json.dumps({"messages": messages}))
    with pytest.warns(UserWarning, match="1 usable document, fewer than the 2 asked for"):
        assert [len(document) for document in read()] == [16]
    text.write_text(json.dumps({"messages": messages[1:]}))
    with pytest.raises(CheckpointError, match=r"text \S+chats.jsonl, chat_template \S+: .*no system message"):
        read()
