"""A tokenizer made of its file alone gives the tokens and the text of transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2TokenizerFast, PreTrainedTokenizerFast

from marlinq.calibration import load_tokenizer
from marlinq.core.errors import CheckpointError
from marlinq.runtime import tokenizer as room
from marlinq.runtime.tokenizer import FileTokenizer, tokenizer_of
from tests.testing.runnable_folders import save_tokenizer

TEXTS = ("", "Hello, world", "<s>two </s> special<pad>", "wörld \U0001f600 日本\n\n  end ")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_tokenizer(folder)
    return folder


def settings(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def later(folder: Path) -> Any:
    """The tokenizer that a second process gets."""
    assert not isinstance(tokenizer_of(folder, kept=True), FileTokenizer)
    return tokenizer_of(folder, kept=True)


def own_post_processor(folder: Path) -> None:
    """The file adds a token at the end; transformers, told so, another at the beginning."""
    path = folder / "tokenizer.json"
    ending = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    special = {"</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]}}
    processor = {"type": "TemplateProcessing", "single": ending, "pair": ending, "special_tokens": special}
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": processor}))
    settings(folder, add_bos_token=True, add_eos_token=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: None,
        own_post_processor,
        lambda folder: settings(folder, add_bos_token=True),
    ],
    ids=["as stored", "own post-processor", "begin token"],
)
def test_tokens_and_text_are_those_of_transformers(folder: Path, change: Callable[[Path], None]) -> None:
    change(folder)
    expected, found = load_tokenizer(folder), later(folder)
    assert isinstance(found, FileTokenizer)
    for text in TEXTS:
        ids = expected(text)["input_ids"]
        assert found(text)["input_ids"] == ids
        for skipped in (True, False):
            options = {"skip_special_tokens": skipped, "clean_up_tokenization_spaces": False}
            assert found.decode(ids, **options) == expected.decode(ids, **options)


def test_truncation_and_padding_of_the_file_hold_for_neither(folder: Path) -> None:
    path = folder / "tokenizer.json"
    file = json.loads(path.read_text())
    file["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(file))
    expected, found = load_tokenizer(folder), later(folder)
    assert isinstance(found, FileTokenizer)
    assert found(TEXTS[1])["input_ids"] == expected(TEXTS[1])["input_ids"]
    assert len(found(TEXTS[1])["input_ids"]) == len(TEXTS[1])


def test_everything_else_is_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(folder, chat_template="{{ messages[0]['content'] }}!")
    found = later(folder)
    assert isinstance(found, FileTokenizer)
    loaded: list[Path] = []

    def counted(folder: Path) -> Any:
        loaded.append(folder)
        return load_tokenizer(folder)

    monkeypatch.setattr(room, "load_tokenizer", counted)
    assert found.name_or_path == str(folder)
    assert not loaded
    assert found.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a!"
    assert found.chat_template is not None
    batch = found(["a", "bcd"], padding=True)["input_ids"]
    assert [len(row) for row in batch] == [3, 3]
    assert found.decode([40, 41]) == load_tokenizer(folder).decode([40, 41])
    assert loaded == [folder]
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = found.no_such_name


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_change_of_any_file_is_another_question(folder: Path, name: str) -> None:
    assert isinstance(later(folder), FileTokenizer)
    path = folder / name
    path.write_text((path.read_text() if path.exists() else "{}") + "\n")
    assert not isinstance(tokenizer_of(folder, kept=True), FileTokenizer)


def test_tokenizers_not_described_by_their_file_are_transformers(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token that only the settings know.
    added = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    settings(folder, added_tokens_decoder={"259": {**added, "single_word": False}})
    assert not isinstance(later(folder), FileTokenizer)
    save_tokenizer(folder)
    settings(folder, split_special_tokens=True)
    assert not isinstance(later(folder), FileTokenizer)
    save_tokenizer(folder)

    # A class with a way of its own.
    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args: Any, **kwargs: Any) -> str:
            return "own"

    Own.__module__ = GPT2TokenizerFast.__module__
    own = Own.from_pretrained(folder)
    monkeypatch.setattr(room, "load_tokenizer", lambda *_, **__: own)
    assert tokenizer_of(folder, kept=True) is own
    assert tokenizer_of(folder, kept=True) is own
    assert not cache.exists()


def test_without_leave_or_with_foreign_code_nothing_is_remembered(folder: Path, cache: Path) -> None:
    for _ in range(2):
        assert not isinstance(tokenizer_of(folder), FileTokenizer)
        assert not isinstance(tokenizer_of(folder, trust_remote_code=True, kept=True), FileTokenizer)
    assert not cache.exists()


def test_a_damaged_file_is_named(folder: Path) -> None:
    later(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        tokenizer_of(folder, kept=True)
