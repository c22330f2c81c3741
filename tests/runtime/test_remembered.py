"""Recognised anatomies are remembered as they were; damaged notes, or those of other models, are not used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from marlinq.core.notes import note
from marlinq.models.anatomy import Anatomy, Unrecognised
from marlinq.models.blueprint import decoder_blocks
from marlinq.models.recognise import recognise
from marlinq.runtime import remembered
from marlinq.runtime.remembered import recognise_once
from tests.testing.decoders import KNOWN, UNKNOWN, random_decoder
from tests.testing.mixtures import random_mixture


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def found_anew(monkeypatch: pytest.MonkeyPatch) -> list[PreTrainedModel]:
    """The models that were really looked at."""
    looked: list[PreTrainedModel] = []

    def counted(model: PreTrainedModel, blocks_name: str) -> Anatomy | Unrecognised:
        looked.append(model)
        return recognise(model, blocks_name)

    monkeypatch.setattr(remembered, "recognise", counted)
    return looked


def once(model: PreTrainedModel) -> Anatomy | Unrecognised:
    return recognise_once(model, decoder_blocks(model, "model")[0])


@pytest.mark.parametrize("name", ["llama", "gemma-3", "gpt-2", "qwen3-moe"])
def test_an_anatomy_is_read_as_it_was_found(name: str, found_anew: list[PreTrainedModel]) -> None:
    model = random_mixture("qwen3-moe") if name == "qwen3-moe" else random_decoder(KNOWN[name])
    first = once(model)
    assert isinstance(first, Anatomy)
    again = once(model)
    assert again == first
    # The note of a passed probe is named for it (runtime/step/probe_results.py).
    assert repr(again) == repr(first)
    assert len(found_anew) == 1


def test_models_dtypes_and_code_have_notes_of_their_own(
    found_anew: list[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = random_decoder(KNOWN["llama"])
    others = (
        random_decoder(KNOWN["llama-biases"]),
        random_decoder(KNOWN["llama"], dtype=torch.bfloat16),
        random_decoder(KNOWN["mistral"]),
    )
    for model in (llama, *others):
        once(model)
    assert len(found_anew) == 4
    monkeypatch.setattr("marlinq.core.notes.code_digest", lambda _: "other files")
    once(llama)
    assert len(found_anew) == 5
    monkeypatch.setattr(remembered.transformers, "__version__", "0")
    once(llama)
    assert len(found_anew) == 6


@pytest.mark.parametrize("damage", ["cut", "changed", "other"])
def test_a_damaged_entry_is_found_anew_and_replaced(
    damage: str, cache: Path, found_anew: list[PreTrainedModel]
) -> None:
    model = random_decoder(KNOWN["llama"])
    first = once(model)
    (entry,) = cache.iterdir()
    content = entry.read_bytes()
    if damage == "cut":
        entry.write_bytes(content[:-1])
    elif damage == "changed":
        assert b'"eps": 1' in content
        entry.write_bytes(content.replace(b'"eps": 1', b'"eps": 2'))
    else:
        # Whole, but of another kind.
        note(entry.name, {"class": "Rotary", "module": "x", "frequencies": "y", "channels": 3})
    assert once(model) == first
    assert len(found_anew) == 2
    assert entry.read_bytes() == content
    once(model)
    assert len(found_anew) == 2


def test_refusals_are_not_remembered(cache: Path, found_anew: list[PreTrainedModel]) -> None:
    model = random_decoder(UNKNOWN["bloom"][0])
    assert isinstance(once(model), Unrecognised)
    assert isinstance(once(model), Unrecognised)
    assert len(found_anew) == 2
    assert not cache.exists()


def test_code_that_a_checkpoint_brings_is_looked_at_every_time(
    cache: Path, found_anew: list[PreTrainedModel]
) -> None:
    class Brought(LlamaForCausalLM):
        pass

    model = random_decoder(KNOWN["llama"])
    model.__class__ = Brought
    assert isinstance(once(model), Anatomy)
    assert isinstance(once(model), Anatomy)
    assert len(found_anew) == 2
    assert not cache.exists()


def test_a_folder_that_can_not_be_written_costs_nothing_but_time(
    cache: Path, found_anew: list[PreTrainedModel]
) -> None:
    cache.parent.write_text("a file")
    model = random_decoder(KNOWN["llama"])
    assert once(model) == once(model)
    assert len(found_anew) == 2
