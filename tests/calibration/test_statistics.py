from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from marlinq.calibration import Document, HiddenStates, make_batches
from marlinq.core.errors import OutputError

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


@pytest.mark.parametrize("call", ["posix_fallocate", "open"])
def test_a_disk_without_room_for_hidden_states_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputError, match=r"no room for 0\.0 GB of hidden states \(.*quota"):
        HiddenStates([(2, 3, 4)], dtype=torch.float32, device=CPU, limit_bytes=1, folder=tmp_path)


def test_hidden_states_go_to_the_host_where_another_process_took_the_device_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def full(*size: int, device: object = None, **kwargs: object) -> torch.Tensor:
        if device is not None:
            raise torch.OutOfMemoryError("taken")
        return empty(*size, **kwargs)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", full)
    shapes = [(2, 3, 4), (1, 5, 4)]
    given = {"dtype": torch.float32, "device": CPU, "folder": tmp_path, "device_bytes": 10**9}
    states = HiddenStates(shapes, limit_bytes=10**9, **given)  # type: ignore[arg-type]
    assert not states.on_disk
    assert HiddenStates(shapes, limit_bytes=0, **given).on_disk  # type: ignore[arg-type]
    states.store(1, torch.ones(1, 5, 4))
    assert bool((states.load(1) == 1).all())
