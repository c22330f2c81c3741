from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from marlinq.calibration import read_documents
from marlinq.calibration.chat import Chat, read_chat, render_chat
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.operations.evaluate.windows import read_windows
from tests.testing.runnable_folders import save_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
ROLES = [{"role": "user", "content": "What is a byte?"}, {"role": "assistant", "content": "Eight bits."}]
SPEAKERS = [{"from": "human", "value": "What is a byte?"}, {"from": "gpt", "value": "Eight bits."}]
RENDERED = "<s>[user] What is a byte?</s>[assistant] Eight bits.</s>"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """One token a byte; begins every text with <s>, unless told not to."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def table(path: Path, **row: object) -> Path:
    path.write_text((json.dumps(row) + "\n") * 4)
    return path


@pytest.mark.parametrize(("column", "messages"), [("messages", ROLES), ("conversations", SPEAKERS)])
def test_columns_of_messages_are_found_and_rendered(
    tmp_path: Path, tokenizer: Any, column: str, messages: list[dict[str, str]]
) -> None:
    path = table(tmp_path / "chats.jsonl", id="a", topic="b", **{column: messages})
    (document, *_) = read_documents(
        str(path), tokenizer=lambda: tokenizer, samples=1, max_length=100, seed=0, vocabulary=300
    )
    assert tokenizer.decode(document.tokens) == RENDERED
    # The template's own <s> is the only one.
    assert document.tokens.count(1) == 1
    length = len(document)
    found = read_windows(str(path), tokenizer, windows=3, length=length + 1, vocabulary=300)
    assert found.windows == ((1, *document.tokens),) * 3


def test_text_comes_before_messages(tmp_path: Path, tokenizer: Any) -> None:
    path = table(tmp_path / "both.jsonl", text="plain text, long enough", messages=ROLES)
    for source, expected in ((path, "<s>plain text, long enough"), (f"{path}#messages", RENDERED)):
        (document, *_) = read_documents(
            str(source), tokenizer=lambda: tokenizer, samples=1, max_length=100, seed=0, vocabulary=300
        )
        assert tokenizer.decode(document.tokens) == expected


def test_messages_as_tables_store_them() -> None:
    # Every message has the keys of all; what is empty was not there.
    chat = read_chat(
        [{"role": "user", "content": "x", "name": None}, {"role": "tool", "content": None, "id": 3}]
    )
    assert chat == Chat(({"role": "user", "content": "x"}, {"role": "tool", "id": 3}))
    assert read_chat([{"from": "system", "value": "x"}]) == Chat(({"role": "system", "content": "x"},))
    assert read_chat([]) == Chat(())
    assert read_chat(["x"]) is read_chat([{"role": 3}]) is read_chat([{"value": "x"}]) is None


def test_a_tokenizer_without_a_template(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = None
    path = table(tmp_path / "chats.jsonl", messages=ROLES)
    with pytest.raises(UnsupportedError, match=r"chats.jsonl: holds chat messages, but .* no chat template"):
        read_documents(
            str(path), tokenizer=lambda: tokenizer, samples=4, max_length=9, seed=0, vocabulary=300
        )
    with pytest.raises(UnsupportedError, match="no chat template"):
        read_windows(str(path), tokenizer, windows=1, length=9, vocabulary=300)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for", "unexpected"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content + 3 }}", "str"),
        ("{{ messages | nosuchfilter }}", "nosuchfilter"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
    ],
)
def test_templates_that_fail_are_one_line(tokenizer: Any, template: str, reason: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(
        CheckpointError, match=r"text chats.jsonl: the chat template can't be rendered"
    ) as caught:
        render_chat(Chat(tuple(ROLES)), tokenizer, "chats.jsonl")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
