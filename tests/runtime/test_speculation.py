"""Drafts of repeating text: what is drafted, when it is checked, and that the text stays what it was."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import NumericsError
from marlinq.runtime import Decoder, LoadedModel, Sampling, generate, generate_batch, load
from marlinq.runtime.speculation import Lookup, LookupSpeculation
from marlinq.runtime.step.forward import Forward
from tests.testing.runnable_folders import save_plain
from tests.testing.tiny_models import tiny_model

PROMPT = [1, 9, 30, 77, 5]


def loaded(folder: Path, name: str = "llama") -> LoadedModel:
    save_plain(folder, tiny_model(name))
    model = load(folder, device="cpu")
    model.model.generation_config.eos_token_id = model.model.config.eos_token_id = None
    return model


def test_drafts_follow_the_longest_and_latest_match() -> None:
    lookup = Lookup([1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 2, 3])
    assert lookup.draft(3) == [7, 8, 2]
    lookup.push(4)
    assert lookup.draft(2) == [5, 9]
    lookup.push(100)
    assert lookup.draft(4) == []


def test_a_short_repetition_goes_round() -> None:
    assert Lookup([6, 7, 8, 7, 8]).draft(5) == [7, 8, 7, 8, 7]
    assert Lookup([4, 4, 4]).draft(3) == [4, 4, 4]


def test_drafts_wait_for_evidence_and_end_without_it() -> None:
    rng = random.Random(0)
    fresh = list(range(10, 74))
    rng.shuffle(fresh)
    speculation = LookupSpeculation(fresh, most=7, cost=2.5)
    for token in fresh[:2]:
        assert not speculation.promising
        speculation.came(token)
    for token in fresh[2:32]:
        speculation.came(token)
    assert speculation.promising
    for wasted in range(100):
        if not speculation.promising:
            break
        speculation.checked([1, 2, 3], [100 + wasted])
    assert 1 <= wasted <= 8
    assert speculation.result().drafted == 3 * wasted
    assert speculation.result().accepted == 0


def steps_for(text: list[int], cost: float) -> float:
    """Steps that take as long as ``text`` does with speculation."""
    speculation = LookupSpeculation([], most=7, cost=cost)
    place, spent = 0, 0.0
    while place < len(text):
        draft = speculation.draft(7) if speculation.promising else []
        if not draft:
            speculation.came(text[place])
            place, spent = place + 1, spent + 1
            continue
        pairs = zip(draft, text[place:], strict=False)
        right = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), len(draft))
        speculation.checked(draft, text[place : place + right + 1])
        place, spent = place + right + 1, spent + cost
    return spent


@pytest.mark.parametrize("cost", [1.3, 2.5])
@pytest.mark.parametrize("vocabulary", [8, 64, 4096])
def test_text_that_only_seems_to_repeat_costs_little(cost: float, vocabulary: int) -> None:
    """Pairs of tokens come again all the time; what follows them does not."""
    rng = random.Random(1)
    text = [rng.randrange(vocabulary) for _ in range(8_000)]
    assert steps_for(text, cost) < 1.03 * len(text)


@pytest.mark.parametrize("cost", [1.3, 1.6])
def test_half_of_the_drafts_make_text_faster(cost: float) -> None:
    """Passages of 12 known tokens between as many new ones."""
    rng = random.Random(1)
    known = [rng.randrange(1000) for _ in range(600)]
    text = list(known)
    for _ in range(200):
        place = rng.randrange(len(known) - 12)
        text += known[place : place + 12] + [rng.randrange(1000, 9999) for _ in range(4)]
    assert steps_for(text, cost) < len(text) / 1.8 + len(known)


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_text_is_that_of_steps(tmp_path: Path, temperature: float | None) -> None:
    model = loaded(tmp_path)
    sampling = Sampling(temperature=temperature, seed=3)
    plain = generate(model, PROMPT, max_new_tokens=64, sampling=sampling, speculate="off")
    drafted = generate(model, PROMPT, max_new_tokens=64, sampling=sampling)
    assert drafted.tokens == plain.tokens
    assert plain.drafts.verifications == 0
    assert "not asked for" in plain.render()
    if temperature is None:
        # Greedy text of tiny models ends in a circle.
        assert drafted.drafts.accepted > 8, drafted.drafts
        assert f"{drafted.drafts.accepted} of {drafted.drafts.drafted} tokens accepted" in drafted.render()
        assert drafted.to_dict()["drafts"]["accepted"] == drafted.drafts.accepted


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt2"])
def test_wrong_drafts_change_nothing(tmp_path: Path, name: str) -> None:
    """A window of 8 is passed too: what a refused draft has left in the cache is never read."""
    model = loaded(tmp_path, name)
    plain = generate(model, PROMPT, max_new_tokens=40, speculate="off").tokens
    decoder = model.decoders.take(lambda *_: pytest.fail("one is kept"), batch=1, tokens=45)
    assert decoder.prepare_drafts() == ""
    decoder.begin([PROMPT])
    tokens = [decoder.read()[0][0]]
    rng = random.Random(2)
    while len(tokens) < 38:
        right = rng.randrange(0, 8)
        draft = list(plain[len(tokens) : len(tokens) + right])
        draft = [*draft, (plain[min(len(tokens) + right, 39)] + 1) % 128][:7]
        new = decoder.verify(tokens[-1], draft)
        assert len(new) == min(right, 7, 40 - len(tokens)) + 1
        tokens += new
        if rng.random() < 0.5:
            decoder.advance()
            tokens += decoder.read()[0]
    assert tuple(tokens[:40]) == plain[: len(tokens)]


def test_steps_where_drafts_can_not_be_checked(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    penalty = Sampling(repetition_penalty=1.1)
    assert "penalty" in generate(model, PROMPT, max_new_tokens=4, sampling=penalty).drafts.refusal
    assert "2 texts" in generate_batch(model, [PROMPT, PROMPT], max_new_tokens=4).rows[0].drafts.refusal


class OneDistribution(Forward):
    """Says ``logits`` behind whatever."""

    def __init__(self, logits: Tensor) -> None:
        self.batch, self.capacity, self.reason, self.capturable = 1, 64, "a test", False
        self.most_verified = 4
        self.lengths = torch.zeros(1, dtype=torch.int32)
        self._logits = logits[None]

    def prefill(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self._logits.clone()

    def step(self, tokens: Tensor) -> Tensor:
        return self._logits.clone()

    def verify(self, tokens: Tensor) -> Tensor:
        return self._logits.expand(len(tokens), -1).clone()


def test_verified_draws_have_the_models_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, 0.5, -1.0])
    chances = logits.softmax(0)
    decoder = Decoder(OneDistribution(logits), Sampling(temperature=1.0).shape)
    decoder.prepare_drafts()
    counts, accepted, draws = torch.zeros(5), 0, 500
    for seed in range(draws):
        decoder.begin([[0]], Sampling(temperature=1.0, seed=seed))
        first = decoder.read()[0][0]
        new = decoder.verify(first, [0, 0])
        counts[new[0]] += 1
        accepted += len(new) > 1
    # Five standard deviations of a binomial share: exceeded by chance in one of a million.
    expected, found = [*chances.tolist(), float(chances[0])], [*counts.tolist(), accepted]
    for chance, count in zip(expected, found, strict=True):
        assert abs(count / draws - chance) < 5 * math.sqrt(chance * (1 - chance) / draws)


def test_infinite_logits_end_a_verification() -> None:
    forward = OneDistribution(torch.tensor([0.0, 1.0]))
    decoder = Decoder(forward)
    decoder.prepare_drafts()
    decoder.begin([[0]])
    decoder.read()
    forward._logits = torch.tensor([[0.0, math.nan]])
    with pytest.raises(NumericsError, match="NaN"):
        decoder.verify(1, [1])
