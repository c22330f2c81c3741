"""Choosing tokens: exact sets of the filters, distributions of the draws, seeds, penalties, faults."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from marlinq.core.errors import UsageError
from marlinq.runtime.sampling import (
    FAULT,
    GREEDY,
    RING,
    Sampler,
    Sampling,
    choose,
    choose_among_top,
    kept,
    noise,
    philox,
)

VOCABULARY = 300


def made(sampling: Sampling, batch: int = 1, *, streams: Sequence[int] | None = None) -> Sampler:
    sampler = Sampler(sampling.shape, batch, VOCABULARY, torch.device("cpu"))
    sampler.begin(sampling, [[3, 4, 7]] * batch, range(batch) if streams is None else streams)
    return sampler


def draws(sampling: Sampling, logits: Tensor, count: int) -> Tensor:
    """int64 [count] from the same logits [V]: rows of a batch draw from streams of their own."""
    batch = 3000
    found = []
    sampler = made(sampling, batch)
    expanded = logits.expand(batch, -1)
    seen = sampler.state.seen.clone()
    for _ in range(-(-count // batch)):
        sampler.sample(expanded)
        # Every draw is to have the prompt's penalties only.
        sampler.state.seen.copy_(seen)
        found.append(sampler.state.tokens.clone())
    return torch.cat(found)[:count]


def filtered(sampling: Sampling, logits: Tensor, prompt: Sequence[int]) -> Tensor:
    """transformers' own processors, in its own order."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty is not None:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature is not None:
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        processors.append(MinPLogitsWarper(sampling.min_p))
    return processors(torch.tensor([list(prompt)]), logits[None].clone())[0]


FILTERS = [
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=0.7, top_k=20),
    Sampling(temperature=1.0, top_k=VOCABULARY + 9),
    Sampling(temperature=1.0, top_p=0.1),
    Sampling(temperature=1.5, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.99999),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=2.0, min_p=1.0),
    Sampling(temperature=1.3, top_k=60, top_p=0.8, min_p=0.02),
    Sampling(temperature=0.9, top_k=30, top_p=0.95, min_p=0.01, repetition_penalty=1.8),
]


@pytest.mark.parametrize("sampling", FILTERS)
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_filters_keep_the_tokens_that_transformers_keeps(sampling: Sampling, scale: float) -> None:
    for seed in range(20):
        logits = scale * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed))
        expected = filtered(sampling, logits, [3, 4, 7])
        sampler = made(sampling)
        scores = logits[None].clone()
        penalty = sampling.repetition_penalty or 1.0
        for token in (3, 4, 7):
            scores[0, token] *= penalty if logits[token] < 0 else 1 / penalty
        scores *= sampler.state.values[0, 0]
        found = kept(scores, sampler.state)[0]
        assert torch.equal(found, expected > -math.inf), seed
        # The token that the sampler draws lies in the set.
        sampler.sample(logits[None])
        assert expected[int(sampler.state.tokens[0])] > -math.inf


def test_equal_logits_stay_or_go_together() -> None:
    logits = torch.full((1, VOCABULARY), -9.0)
    logits[0, 10:15] = 2.0
    logits[0, 20:25] = 1.0
    for sampling, count in (
        (Sampling(temperature=1.0, top_k=2), 5),
        (Sampling(temperature=1.0, top_k=6), 10),
        (Sampling(temperature=1.0, top_p=0.2), 5),
        (Sampling(temperature=1.0, top_p=0.8), 10),
    ):
        assert int(kept(logits, made(sampling).state).sum()) == count


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), *FILTERS[1:2], *FILTERS[4:5], *FILTERS[8:]])
def test_draws_have_the_distribution_of_the_softmax(sampling: Sampling) -> None:
    """Chi-square over 30,000 draws. The seeds are fixed, so the test never flickers; a sampler that is right
    stays below the bound, four standard deviations above the mean of chi-square, for all but about one in
    10,000 seeds, and one that moves a tenth of the probability exceeds it by far."""
    logits = 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    count = 30_000
    expected = count * torch.softmax(filtered(sampling, logits, [3, 4, 7]).double(), -1)
    found = torch.bincount(draws(sampling, logits, count), minlength=VOCABULARY).double()
    assert not found[expected == 0].any()
    # Tokens that are expected less than ten times make one bin.
    rare = expected < 10
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    found = torch.cat([found[~rare], found[rare].sum()[None]])
    used = expected > 0
    chi_square = float(((found - expected) ** 2 / expected.clamp(min=1e-9))[used].sum())
    freedom = int(used.sum()) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_draws_of_a_row_are_independent() -> None:
    """Consecutive draws: pairs of two equally likely tokens come up alike, within 5 standard deviations."""
    logits = torch.full((1, VOCABULARY), -100.0)
    logits[0, :2] = 0.0
    sampler = made(Sampling(temperature=1.0, seed=9), 2000)
    found = []
    for _ in range(20):
        sampler.sample(logits.expand(2000, -1))
        found.append(sampler.state.tokens.clone())
    drawn = torch.stack(found)
    for first, second in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):
        pairs = torch.bincount((2 * first + second).flatten(), minlength=4).double()
        total = float(pairs.sum())
        assert float((pairs - total / 4).abs().max()) < 5 * math.sqrt(total * 3 / 16)


def test_noise_is_that_of_gumbel() -> None:
    """Kolmogorov-Smirnov over 400,000 values; the bound is crossed by chance in 1 of 10^8 seeds."""
    sampler = made(Sampling(temperature=1.0, seed=11), 800)
    values = noise(VOCABULARY, sampler.state).flatten().double().sort().values
    steps = torch.arange(1, len(values) + 1) / len(values)
    difference = float((torch.exp(-torch.exp(-values)) - steps).abs().max())
    assert difference < 3.1 / math.sqrt(len(values))


def test_a_row_draws_the_same_wherever_it_stands() -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=123456789012345)
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(2))
    together = made(sampling, 6)
    apart = [made(sampling, 1, streams=[row]) for row in range(6)]
    for _ in range(10):
        together.sample(logits)
        for row, alone in enumerate(apart):
            alone.sample(logits[row : row + 1])
            assert alone.state.tokens[0] == together.state.tokens[row]
    other = made(Sampling(temperature=1.0, top_p=0.9, seed=123456789012346), 6)
    again = made(sampling, 6)
    for sampler in (other, again):
        for _ in range(10):
            sampler.sample(logits)
    assert torch.equal(again.state.ring, together.state.ring)
    assert not torch.equal(other.state.ring, together.state.ring)


def test_the_counter_based_generator_gives_its_published_vectors() -> None:
    """The known answers that the authors of Random123 give for philox4x32-10."""

    def words(*values: int) -> list[Tensor]:
        return [torch.tensor([value]) for value in values]

    for counter, key, expected in (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ):
        a, b, c, d = words(*counter)
        first, second = words(*key)
        assert tuple(int(word) for word in philox((a, b, c, d), (first, second))) == expected


def test_greedy_takes_the_first_of_equals_and_penalties_count_the_text() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [40, 200, 90]] = 1.0
    sampler = made(GREEDY)
    sampler.sample(logits)
    assert int(sampler.state.tokens) == 40
    penalised = made(Sampling(repetition_penalty=1.5))
    for expected in (40, 90, 200, 40):
        # A token that was taken falls behind; when all three have, the first leads again.
        penalised.sample(logits)
        assert int(penalised.state.tokens) == expected
    # Prompt tokens 3, 4 and 7 are the most likely, but penalised: positive logits shrink, negative ones sink.
    logits = torch.full((1, VOCABULARY), -3.0)
    logits[0, [3, 11]] = torch.tensor([1.2, 1.0])
    penalised = made(Sampling(repetition_penalty=1.5))
    penalised.sample(logits)
    assert int(penalised.state.tokens) == 11
    negative = torch.full((1, VOCABULARY), -3.0)
    negative[0, [4, 11]] = torch.tensor([-1.0, -1.4])
    penalised = made(Sampling(repetition_penalty=1.5))
    penalised.sample(negative)
    assert int(penalised.state.tokens) == 11


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0), FILTERS[-1]])
def test_rows_that_are_no_numbers_are_marked(sampling: Sampling, value: float) -> None:
    logits = torch.randn(3, VOCABULARY)
    logits[1, 30] = value
    logits[2] = -math.inf
    sampler = made(sampling, 3)
    sampler.sample(logits)
    assert sampler.state.ring[0, 0] >= 0
    assert sampler.state.ring[0, 1:].tolist() == [FAULT, FAULT]
    assert 0 <= int(sampler.state.tokens.min()) <= int(sampler.state.tokens.max()) < VOCABULARY


def test_the_ring_goes_round() -> None:
    sampler = made(GREEDY)
    for number in range(RING + 3):
        logits = torch.zeros(1, VOCABULARY)
        logits[0, number] = 1.0
        sampler.sample(logits)
    assert sampler.state.ring[:4, 0].tolist() == [RING, RING + 1, RING + 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected 0.001 to 1000, or none for greedy, found 0.0"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 1.0, "top_k": -1}, "top_k: expected 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p: expected more than 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p: expected more than 0, at most 1, found 1.5"),
        ({"temperature": 1.0, "min_p": -0.1}, "min_p: expected 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected 0.001"),
        ({"seed": -1}, "seed: expected 0 to"),
        ({"top_k": 5}, "top_k: filters what is drawn, but greedy draws nothing"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("^", r"\^")):
        Sampling(**options)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=0.7, top_k=50, seed=3),
        Sampling(temperature=1.3, top_k=20, top_p=0.8, min_p=0.02, seed=2**40),
        Sampling(temperature=0.9, top_k=30, repetition_penalty=1.8),
    ],
    ids=str,
)
def test_few_candidates_give_the_token_of_the_whole_vocabulary(sampling: Sampling) -> None:
    batch, vocabulary = 16, 1000
    sampler = Sampler(sampling.shape, batch, vocabulary, torch.device("cpu"))
    sampler.begin(sampling, [[n, 3 * n] for n in range(batch)], range(5, 5 + batch))
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        # Coarse logits, so that many are equal, also to the last that top-k leaves.
        logits = torch.randn(batch, vocabulary, generator=generator) * 4
        logits = (logits * 64).round() / 64 if step % 2 else logits
        sampler.state.drawn.fill_(step)
        found = choose_among_top(logits, sampling.shape, sampler.state)
        expected = choose(logits, sampling.shape, sampler.state)
        assert found is not None
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        if sampling.shape.penalty:
            sampler.state.seen[:, step] = 1


def test_too_many_equals_are_left_to_the_whole_vocabulary() -> None:
    sampling = Sampling(temperature=1.0, top_k=4)
    sampler = Sampler(sampling.shape, 1, 1000, torch.device("cpu"))
    sampler.begin(sampling, [[1]], [0])
    logits = torch.zeros(1, 1000)
    assert choose_among_top(logits, sampling.shape, sampler.state) is None
    assert choose_among_top(logits[:, :100], sampling.shape, sampler.state) is None
    logits[0, 7] = float("nan")
    tokens, fault = choose_among_top(logits, sampling.shape, sampler.state) or choose(
        logits, sampling.shape, sampler.state
    )
    assert bool(fault)
    assert 0 <= int(tokens) < 1000
