from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marlinq.calibration import Document, HiddenStates, generate_documents, make_batches
from marlinq.core.errors import NumericsError, OutputError
from tests.testing.tiny_models import tiny_model

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100), st.booleans())
def test_batches_hold_every_document_once_within_the_budget(
    lengths: list[int], budget: int, pad: bool
) -> None:
    documents = [Document(tuple(range(number, number + length))) for number, length in enumerate(lengths)]
    batches = make_batches(documents, token_budget=budget, pad=pad)
    found = []
    for batch in batches:
        assert batch.ids.shape == (len(batch.lengths), max(batch.lengths))
        assert batch.ids.numel() <= budget or len(batch.lengths) == 1
        assert batch.padded == (len(set(batch.lengths)) > 1)
        assert pad or not batch.padded
        assert batch.mask().sum(1).tolist() == list(batch.lengths)
        for row, mask in zip(batch.ids, batch.mask(), strict=True):
            found.append(Document(tuple(row[mask].tolist())))
            assert not row[~mask].any()
    assert sorted(found, key=lambda d: d.tokens) == sorted(documents, key=lambda d: d.tokens)


def test_batches_don_t_depend_on_the_machine_or_the_run() -> None:
    documents = [Document(tuple(range(length))) for length in (5, 9, 5, 7, 9)]
    first, second = (make_batches(documents, token_budget=20) for _ in range(2))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("limit", [0, 10**9])
def test_hidden_states_come_back_from_memory_and_disk(tmp_path: Path, limit: int) -> None:
    shapes = [(2, 3, 4), (1, 5, 4)]
    states = HiddenStates(shapes, dtype=torch.bfloat16, device=CPU, limit_bytes=limit, folder=tmp_path)
    assert states.on_disk == (limit == 0)
    values = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
    for batch, value in enumerate(values):
        states.store(batch, value)
    loaded = states.load(0)
    loaded.zero_()
    assert all(torch.equal(states.load(batch), value) for batch, value in enumerate(values))
    assert list(tmp_path.iterdir()) == []


def generate(name: str, seed: int, samples: int = 70, max_length: int = 24) -> list[Document]:
    model = tiny_model(name)
    return generate_documents(
        model, model.config, samples=samples, max_length=max_length, seed=seed, device=CPU
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "falcon"])
def test_a_model_writes_documents_of_natural_lengths(name: str) -> None:
    documents = generate(name, 0)
    assert len(documents) == 70
    assert all(document.tokens[0] == 1 for document in documents)
    assert len({document.tokens[1] for document in documents}) > 20
    for document in documents:
        ended = document.tokens[-1] == 2
        assert 16 <= len(document) <= 24
        assert ended or len(document) == 24
        assert 2 not in document.tokens[:-1]
    assert documents == generate(name, 0)
    assert documents != generate(name, 1)


def test_removing_ended_documents_leaves_the_others_context_alone() -> None:
    model = tiny_model("llama")
    # Many end tokens, so that documents leave the batch at different times.
    model.config.eos_token_id = list(range(2, 24))
    documents = generate_documents(
        model, model.config, samples=8, max_length=40, seed=3, device=CPU, temperature=1e-4
    )
    # At this temperature each token is the likeliest one, so one forward over the document must agree.
    assert len({len(document) for document in documents}) > 1
    for document in documents:
        ids = torch.tensor(document.tokens)
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0]
        likeliest = logits[15:-1].argmax(-1)
        assert torch.equal(likeliest, ids[16:])


def test_a_model_that_breaks_while_writing_is_reported() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    with pytest.raises(NumericsError, match="logits are NaN"):
        generate_documents(model, model.config, samples=1, max_length=20, seed=0, device=CPU)


@pytest.mark.parametrize("call", ["posix_fallocate", "open"])
def test_a_disk_without_room_for_hidden_states_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match=r"no room for 0\.0 GB of hidden states \(.*quota"):
        HiddenStates([(2, 3, 4)], dtype=torch.float32, device=CPU, limit_bytes=1, folder=tmp_path)
