"""Text that models write themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import PreTrainedModel

from marlinq.core.errors import NumericsError, UnsupportedError
from marlinq.runtime import LoadedModel, writing
from marlinq.runtime.writing import STAGE, TOP_K, TextWriter, Written
from tests.testing.tiny_models import tiny_model

CPU = torch.device("cpu")
BEGIN, END, USER, CLOSE, ANSWER = 1, 2, 3, 4, 5


def loaded(model: PreTrainedModel, tokenizer: Any = None) -> LoadedModel:
    return LoadedModel(Path("tiny"), model, tokenizer, CPU, torch.float32, {}, ())


def write(
    model: PreTrainedModel,
    *,
    seed: int = 0,
    documents: int | None = 70,
    tokens: int = 10**6,
    max_length: int = 24,
    rows: int = 70,
    top_k: int = TOP_K,
    **options: Any,
) -> Written:
    writer = TextWriter(loaded(model, **options), rows=rows, max_length=max_length, seed=seed, top_k=top_k)
    try:
        return writer.write(tokens=tokens, documents=documents)
    finally:
        writer.close()


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "falcon"])
def test_a_model_writes_documents_of_natural_lengths(name: str) -> None:
    documents = write(tiny_model(name)).documents
    assert len(documents) == 70
    assert all(document[0] == BEGIN for document in documents)
    assert len({document[1] for document in documents}) > 20
    for document in documents:
        assert 16 <= len(document) <= 24
        assert document[-1] == END or len(document) == 24
        # An end token before the sixteenth does not end a document.
        assert END not in document[15:-1]
    assert documents == write(tiny_model(name)).documents
    assert documents != write(tiny_model(name), seed=1).documents


def test_tokens_are_drawn_from_the_likeliest_or_from_all() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = model.config.eos_token_id = None

    def ranks(top_k: int) -> list[int]:
        """Number of likelier tokens for every token that was drawn."""
        found = []
        for document in write(model, documents=8, rows=8, top_k=top_k).documents:
            ids = torch.tensor(document)
            with torch.no_grad():
                logits = model(ids[None]).logits[0, 1:-1]
            found += (logits > logits.gather(1, ids[2:, None])).sum(1).tolist()
        return found

    # A rank may be missed by one where a step's logits are rounded in another way.
    assert max(ranks(5)) <= 5
    drawn = ranks(0)
    assert max(drawn) > 50
    assert len(set(drawn)) > 20


def test_much_text_takes_as_many_rounds_as_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_FEWEST_ROUNDS", 2)
    model = tiny_model("llama")
    written = write(model, tokens=200, documents=None, rows=2, max_length=16)
    assert written.rounds == 6
    monkeypatch.setattr(writing, "_SMALL_SHARE", 0)
    with pytest.raises(UnsupportedError, match="repeats itself: 64 tokens in 4 of them"):
        write(model, tokens=200, documents=None, rows=2, max_length=16)


def test_few_tokens_more_take_one_round_more() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    written = write(model, tokens=8 * 24 + 20, documents=None, rows=8)
    assert written.rounds == 2
    assert [len(document) for document in written.documents] == [24] * 8 + [16]


def test_rows_that_end_leave_the_others_alone() -> None:
    model = tiny_model("llama")
    alone = write(model, documents=8, rows=8, max_length=40).documents
    # With many end tokens rows end at different times; what the others draw stays the same.
    model.config.eos_token_id = list(range(2, 8))
    model.generation_config.eos_token_id = list(range(2, 8))
    ended = write(model, documents=8, rows=8, max_length=40).documents
    assert len({len(document) for document in ended}) > 1
    for document in ended:
        if document[1] in {other[1] for other in alone}:
            assert any(other[: len(document)] == document for other in alone)


def test_every_token_is_one_of_the_fifty_most_likely() -> None:
    model = tiny_model("gemma3")
    for document in write(model, documents=5, rows=5).documents:
        ids = torch.tensor(document)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        # A forward over the whole document rounds otherwise than steps do, by far less than this.
        least = logits[1:-1].topk(50).values[:, -1] - 1e-3
        assert bool((logits[1:-1].gather(1, ids[2:, None])[:, 0] >= least).all())


def test_tokens_bound_what_is_written() -> None:
    written = write(tiny_model("llama"), documents=None, tokens=200, rows=4)
    # Too few tokens for a last document, fewer than 16, are left unwritten.
    assert 200 - 16 < sum(map(len, written.documents)) <= 200
    assert written.rounds > 1
    whole = write(tiny_model("llama"), documents=None, tokens=10**3, rows=4)
    assert whole.documents[: len(written.documents) - 1] == written.documents[:-1]


def test_a_round_ends_when_few_rows_are_left() -> None:
    model = tiny_model("llama")
    # Half of all tokens end a document that has sixteen of them.
    ends = list(range(2, 66))
    model.config.eos_token_id = ends
    model.generation_config.eos_token_id = ends
    steps: list[int] = []
    writer = TextWriter(
        loaded(model), rows=32, max_length=128, seed=0, progress=lambda stage, done, total: steps.append(done)
    )
    written = writer.write(tokens=10**5, documents=32)
    writer.close()
    # A few of 126 steps are enough; a message a step, one at the beginning and one at the end.
    assert len(steps) < 30
    assert written.rounds == 1
    assert max(map(len, written.documents)) < 30


def loops(document: tuple[int, ...]) -> list[int]:
    """Lengths of the runs of sequences of eight tokens that occur in the document before."""
    seen: set[tuple[int, ...]] = set()
    runs = [0]
    for end in range(2 + 8, len(document) + 1):
        last = document[end - 8 : end]
        if last in seen:
            runs[-1] += 1
        else:
            runs.append(0)
        seen.add(last)
    return [run for run in runs if run]


def test_a_document_ends_where_the_model_repeats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    # With top_k 1 a token depends on the text only, so that a repeated text is repeated again.
    model = tiny_model("llama", max_position_embeddings=512)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    shown: list[int] = []
    writer = TextWriter(
        loaded(model),
        rows=8,
        max_length=120,
        seed=0,
        top_k=1,
        progress=lambda stage, done, total: shown.append(done),
    )
    cut = writer.write(tokens=10**5, documents=8).documents
    writer.close()
    assert shown == sorted(shown)
    monkeypatch.setattr(writing, "_REPEATED", 10**6)
    whole = write(model, documents=16, rows=8, max_length=120, top_k=1).documents
    by_beginning = {document[1]: document for document in whole}
    longest = max(map(len, cut))
    looped = 0
    for document in cut:
        assert max(loops(document), default=0) < 24
        known = by_beginning[document[1]]
        assert document == known[: len(document)]
        # It ends in front of its first loop, or where all ended, since few were left.
        if len(document) < longest:
            looped += 1
            assert loops(known[: len(document) + 24])[-1] == 24
    assert looped > 3


def test_a_model_that_only_repeats_itself_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_FEWEST_ROUNDS", 2)
    monkeypatch.setattr(writing, "_SMALL_SHARE", 0)
    model = tiny_model("llama", max_position_embeddings=512)
    with torch.no_grad():
        # The probability of token 7 is 1, whatever the text.
        model.lm_head.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
        model.lm_head.bias[7] = 100
    with pytest.raises(UnsupportedError, match="or repeats itself: 0 tokens in 8 of them"):
        write(model, tokens=1000, documents=None, rows=4, max_length=200)


def test_progress_counts_tokens_up_to_the_end() -> None:
    seen: list[tuple[str, int, int]] = []
    writer = TextWriter(
        loaded(tiny_model("phi")),
        rows=3,
        max_length=30,
        seed=0,
        progress=lambda *step: seen.append(step),
    )
    writer.write(tokens=150)
    writer.close()
    assert {(stage, total) for stage, _, total in seen} == {(STAGE, 150)}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == 150


def test_a_probe_leaves_the_text_as_it_is() -> None:
    writer = TextWriter(loaded(tiny_model("llama")), rows=4, max_length=24, seed=0)
    assert 0 < writer.seconds_a_step() < 10
    assert 0 < writer.seconds_a_step(behind=20) < 10
    documents = writer.write(tokens=10**6, documents=4).documents
    writer.close()
    assert documents == write(tiny_model("llama"), documents=4, rows=4).documents


def test_a_step_is_probed_behind_as_many_tokens_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = loaded(tiny_model("llama"))
    writer = TextWriter(found, rows=2, max_length=64, seed=0)
    forward = writer._decoder.forward
    step, seen = forward.step, []

    def noted(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(forward.lengths.tolist())
        return step(tokens)

    monkeypatch.setattr(forward, "step", noted)
    writer.seconds_a_step(behind=40)
    writer.close()
    assert seen == 2 * [[40, 40], [41, 41], [42, 42]]


@pytest.mark.parametrize(
    ("tokens", "max_length", "ends", "expected"),
    [
        # One round that no document leaves, of 1152 steps behind 576 tokens on average.
        (147_456, 1536, False, 1152 * (6 + 6 * 576 / 1532)),
        # 62.5 % of the rows go on, on average, and rounds end at 1200 tokens.
        (393_216, 2048, True, 3072 / 0.625 * (6 + 6 * 600 / 2044)),
        # Short documents: 92 % of the rows go on.
        (16_384, 256, True, 128 / 0.92 * (6 + 6 * 64 / 0.92 / 252)),
    ],
)
def test_the_time_of_writing_is_foretold(
    tokens: int, max_length: int, ends: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", max_position_embeddings=2048)
    model.generation_config.eos_token_id = 2 if ends else None
    model.config.eos_token_id = 2 if ends else None
    writer = TextWriter(loaded(model), rows=128, max_length=max_length, seed=0)
    monkeypatch.setattr(writer, "seconds_a_step", lambda behind=2: 6.0 if behind == 2 else 12.0)
    assert writer.seconds_for(tokens) == pytest.approx(expected)
    writer.close()


def test_a_model_that_breaks_while_writing_is_reported() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(NumericsError, match="logits are NaN"):
        write(model, documents=1, rows=1)


class Chatty:
    """A tokenizer of one token a character, whose chat template is written with single characters."""

    name_or_path = "chatty"
    chat_template: str | None = "a template"
    _MARKS: ClassVar = {BEGIN: "<", END: ">", USER: "U", CLOSE: "C", ANSWER: "A"}

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        (message,) = messages
        return f"<U{message['content']}C" + ("A" if add_generation_prompt else "")

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        marks = {mark: token for token, mark in self._MARKS.items()}
        return {"input_ids": [marks.get(letter, ord(letter) - 0x4E00) for letter in text]}

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        kept = [t for t in tokens if not (skip_special_tokens and t in self._MARKS)]
        return "".join(self._MARKS.get(token, chr(0x4E00 + token)) for token in kept)


def chat_model() -> PreTrainedModel:
    model = tiny_model("llama")
    # The message's end is an end token, as in most templates; what it answers ends with another one.
    model.config.eos_token_id = [END, CLOSE]
    model.generation_config.eos_token_id = [END, CLOSE]
    return model


def test_conversations_follow_the_models_template() -> None:
    writer = TextWriter(loaded(chat_model(), Chatty()), rows=6, max_length=60, seed=0, chat=True)
    documents = writer.write(tokens=10**6, documents=12).documents
    writer.close()
    assert len(documents) == 12
    for document in documents:
        assert document[:2] == (BEGIN, USER)
        asked = document.index(CLOSE)
        assert 2 < asked < 2 + 64
        assert document[asked + 1] == ANSWER
        assert len(document) > asked + 2
        assert not {END, CLOSE} & set(document[max(asked + 2, 15) : -1])
    assert len({document[: document.index(CLOSE)] for document in documents}) > 6


def test_a_tokenizer_without_a_template_can_t_chat() -> None:
    tokenizer = Chatty()
    tokenizer.chat_template = None
    for each in (None, tokenizer):
        with pytest.raises(UnsupportedError, match="has no chat template; leave the option out"):
            TextWriter(loaded(chat_model(), each), rows=2, max_length=60, seed=0, chat=True)


def test_a_template_that_drops_the_message_is_refused() -> None:
    tokenizer = Chatty()
    tokenizer.apply_chat_template = lambda *args, **options: "<U"  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="leaves out a user's message"):
        TextWriter(loaded(chat_model(), tokenizer), rows=2, max_length=60, seed=0, chat=True)


def test_a_template_that_begins_with_the_message_is_refused() -> None:
    tokenizer = Chatty()
    tokenizer.apply_chat_template = lambda messages, **options: messages[0]["content"]  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="writes nothing before a user's message"):
        TextWriter(loaded(chat_model(), tokenizer), rows=2, max_length=60, seed=0, chat=True)


def test_questions_that_fill_the_length_are_refused() -> None:
    writer = TextWriter(loaded(chat_model(), Chatty()), rows=2, max_length=3, seed=0, chat=True)
    with pytest.raises(UnsupportedError, match="raise --max-length"):
        writer.write(tokens=100)
    writer.close()
