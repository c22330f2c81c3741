"""Choose the next token of every row of a batch: the most likely one, or a random one among those that
filters keep.

The order is that of transformers: repetition penalty, temperature, top-k, top-p, min-p. All of it is
computed in float32 on the distance of a logit from the row's largest, in units of 2^-19: logits closer than
that count as equal, and so do all that are 64 or more below the largest, whose probability is below 2e-28. A
filter keeps or drops equal logits together. Of equal winners the one with the lowest id is taken.

A draw adds noise to every logit that is left and takes the largest sum (the Gumbel-max trick), which is a
draw from their softmax. The noise comes from a counter-based generator, Philox4x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", 2011): its key is the seed, its counter the token's id, the
number of tokens that the row has drawn before, and the row's stream. So equal logits, seed and stream give
the same token whatever the other rows are, and, but for ties within rounding, on every device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from marlinq.core.errors import UsageError
from marlinq.kernels.launch.token_sampling import (
    SamplerState,
    SampleTensors,
    precompile_sampling,
    sample_tokens,
)

UNITS = 2.0**19
"""Distances of logits are counted in units of 1 / UNITS."""
FARTHEST = 2**25 - 2
"""Largest distance, to which larger ones are cut: the largest float32 below 2^25."""
RING = 64
"""Tokens of a row that the ring holds until the host has fetched them."""
FAULT = -1
"""Value in the ring instead of a token where a row's logits were NaN or infinite."""
_MOST_EQUAL = 32
"""Logits beyond top-k that are compared with the k-th, since equal logits are kept together."""
_LOW_32 = 0xFFFFFFFF
_NEVER_ONE = 1.0 - 2.0**-24


class SamplerShape(NamedTuple):
    """Parts of a sampler's work; its kernel is compiled, and a graph captured, for these alone.

    Attributes:
        draws: whether tokens are drawn at random; else the most likely one is taken.
        filters: whether top-k, top-p or min-p is on.
        penalty: whether tokens of the prompt and of the text so far are penalised.
    """

    draws: bool
    filters: bool
    penalty: bool


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: logits are divided by it; None takes the most likely token every time.
        top_k: only this many most likely tokens are drawn from; None or 0 for all.
        top_p: only the fewest most likely tokens whose probabilities add up to this are drawn from; None or 1
            for all.
        min_p: only tokens with at least this share of the largest probability are drawn from; None or 0 for
            all.
        repetition_penalty: logits of tokens that the row has already are divided by it if positive, else
            multiplied; None or 1 for none.
        seed: seed of the draws, 0 to 2^64 - 1.

    Raises:
        UsageError: a value outside of its range, or a filter without a temperature.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        def check(name: str, right: bool, expected: str) -> None:
            if not right:
                raise UsageError(f"{name}: expected {expected}, found {getattr(self, name)}")

        temperature, penalty = self.temperature, self.repetition_penalty
        # Below 1e-3 only the most likely token would ever be drawn, and the reciprocal could overflow.
        check(
            "temperature",
            temperature is None or 1e-3 <= temperature <= 1e3,
            "0.001 to 1000, or none for greedy",
        )
        check("top_k", self.top_k is None or 0 <= self.top_k < 2**31, "0 (all tokens) or more")
        check("top_p", self.top_p is None or 0 < self.top_p <= 1, "more than 0, at most 1")
        check("min_p", self.min_p is None or 0 <= self.min_p <= 1, "0 to 1")
        check("repetition_penalty", penalty is None or 1e-3 <= penalty <= 1e3, "0.001 to 1000")
        check("seed", 0 <= self.seed < 2**64, "0 to 2^64 - 1")
        if self.temperature is None:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{name}: filters what is drawn, but greedy draws nothing; drop one")

    @property
    def shape(self) -> SamplerShape:
        """Parts of a sampler's work under these settings."""
        filters = bool(self.top_k) or self.top_p not in (None, 1.0) or bool(self.min_p)
        return SamplerShape(self.temperature is not None, filters, self.repetition_penalty not in (None, 1.0))


GREEDY = Sampling()
"""The most likely token every time."""


def precompile_sampler(shape: SamplerShape, dtype: torch.dtype, vocabulary: int, device_index: int) -> int:
    """Compile what a :class:`Sampler` needs on a GPU for logits [B, vocabulary], if the cache lacks it.

    Raises:
        EnvironmentProblem: it does not compile, or the cache can't be written.
    """
    return precompile_sampling(dtype, vocabulary, RING, device_index, **shape._asdict())


class Sampler:
    """Chooses a token for each row, again and again, without the host.

    Args:
        shape: operations of the sampler: random draws, filters, a penalty.
        batch: B.
        vocabulary: width of the logits.
        device: device of the logits.

    Attributes:
        state: on ``device``.
    """

    def __init__(self, shape: SamplerShape, batch: int, vocabulary: int, device: torch.device) -> None:
        self.shape = shape
        self.vocabulary = vocabulary
        self.state = SamplerState(
            values=torch.ones((batch, 4), dtype=torch.float32, device=device),
            numbers=torch.zeros((batch, 3), dtype=torch.int64, device=device),
            drawn=torch.zeros(batch, dtype=torch.int32, device=device),
            seen=torch.zeros((batch, vocabulary if shape.penalty else 0), dtype=torch.uint8, device=device),
            tokens=torch.zeros(batch, dtype=torch.int64, device=device),
            ring=torch.zeros((RING, batch), dtype=torch.int64, device=device),
        )

    def begin(self, sampling: Sampling, prompts: Sequence[Sequence[int]], streams: Sequence[int]) -> None:
        """Start over.

        Args:
            sampling: settings of this sampler's shape.
            prompts: token ids of each row, which a penalty counts.
            streams: random stream of each row.
        """
        state = self.state
        reach = -math.log(sampling.min_p) if sampling.min_p else math.inf
        values = (
            1.0 / (sampling.temperature or 1.0),
            sampling.top_p or 1.0,
            reach,
            sampling.repetition_penalty or 1.0,
        )
        seed = sampling.seed - (1 << 64 if sampling.seed >= 1 << 63 else 0)
        numbers = [(seed, stream, sampling.top_k or 0) for stream in streams]
        state.values.copy_(torch.tensor([values], dtype=torch.float32).expand_as(state.values))
        state.numbers.copy_(torch.tensor(numbers, dtype=torch.int64))
        state.drawn.zero_()
        if self.shape.penalty:
            seen = torch.zeros(state.seen.shape, dtype=torch.uint8)
            for row, prompt in enumerate(prompts):
                seen[row, torch.tensor(prompt, dtype=torch.int64)] = 1
            state.seen.copy_(seen)

    def sample(self, logits: Tensor) -> None:
        """Choose from ``logits`` [B, vocabulary], a floating type; no host synchronisation.

        The tokens go to ``state.tokens`` and to their places in ``state.ring``.
        """
        state = self.state
        if logits.is_cuda:
            tensors = SampleTensors(logits if logits.stride(1) == 1 else logits.contiguous(), state)
            sample_tokens(tensors, **self.shape._asdict())
            return
        tokens, fault = choose_among_top(logits, self.shape, state) or choose(logits, self.shape, state)
        state.tokens.copy_(tokens)
        place = (state.drawn % RING).to(torch.int64)[None]
        state.ring.scatter_(0, place, torch.where(fault, FAULT, tokens)[None])
        state.drawn.add_(1)
        if self.shape.penalty:
            state.seen.scatter_(1, tokens[:, None], 1)


def choose(logits: Tensor, shape: SamplerShape, state: SamplerState) -> tuple[Tensor, Tensor]:
    """The reference in torch, on any device; changes nothing.

    Args:
        logits: [B, V], a floating type.
        shape: operations of the sampler: random draws, filters, a penalty.
        state: as it is before the draw.

    Returns:
        Tokens, int64 [B], and whether each row's logits are NaN or infinite, bool [B].
    """
    scores = _scores(logits, shape, state)
    best = scores.amax(dim=-1, keepdim=True)
    fault = ~torch.isfinite(best[:, 0])
    if shape.filters:
        scores = scores.masked_fill(~kept(scores, state), -math.inf)
    if shape.draws:
        scores = scores + noise(scores.shape[1], state)
    return scores.argmax(dim=-1), fault


def choose_among_top(
    logits: Tensor, shape: SamplerShape, state: SamplerState
) -> tuple[Tensor, Tensor] | None:
    """As :func:`choose`, from the logits that top-k leaves: no vocabulary is sorted, and few draws are made.

    Returns:
        None where not every row has a top-k far below the vocabulary, or more logits than were looked at
        equal the last one that it leaves.
    """
    if not (shape.draws and shape.filters):
        return None
    top_k = state.numbers[:, 2:]
    width = int(top_k.max()) + _MOST_EQUAL
    if int(top_k.min()) < 1 or 4 * width > logits.shape[1]:
        return None
    values, ids = _scores(logits, shape, state).topk(width, dim=-1)
    fault = ~torch.isfinite(values[:, 0])
    # The same order of operations as in ``choose`` gives the same bits.
    distances = _distances(values[:, :1] - values)
    limit = distances.gather(1, top_k - 1)
    if bool((distances[:, -1:] <= limit).any()):
        return None
    sums = values.masked_fill(~kept(values, state), -math.inf) + _gumbel(_words_of(ids, state))
    winners = sums == sums.amax(dim=-1, keepdim=True)
    # A row of NaN has no winner, and is a fault.
    tokens = ids.masked_fill(~winners, logits.shape[1] - 1).amin(dim=-1)
    return tokens, fault


def _scores(logits: Tensor, shape: SamplerShape, state: SamplerState) -> Tensor:
    """float32 [B, V]: logits behind penalty and temperature."""
    scores = logits.float()
    if shape.penalty:
        penalty = state.values[:, 3:]
        penalised = torch.where(scores < 0, scores * penalty, scores / penalty)
        scores = torch.where(state.seen.bool(), penalised, scores)
    return scores * state.values[:, :1] if shape.draws else scores


def kept(scores: Tensor, state: SamplerState) -> Tensor:
    """Whether top-k, then top-p, then min-p keep each token of ``scores`` [B, V]; bool [B, V]."""
    nats = scores.amax(dim=-1, keepdim=True) - scores
    distances = _distances(nats)
    ordered, order = distances.sort(dim=-1)
    vocabulary = scores.shape[1]
    top_k = state.numbers[:, 2:]
    places = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary) - 1
    limit = ordered.gather(1, places)
    # Of what top-k leaves, as few of the nearest as reach the share top_p of its probability.
    weights = torch.where(ordered <= limit, torch.exp(-nats).double().gather(1, order), 0.0)
    mass = weights.cumsum(dim=-1)
    top_p = state.values[:, 1:2].double()
    missing = mass < top_p * mass[:, -1:]
    places = missing.sum(dim=-1, keepdim=True).clamp(max=vocabulary - 1)
    limit = torch.where(top_p < 1, torch.minimum(limit, ordered.gather(1, places)), limit)
    reach = (state.values[:, 2:3] * UNITS).clamp(max=FARTHEST).to(torch.int64)
    return distances <= torch.minimum(limit, reach)


def _distances(nats: Tensor) -> Tensor:
    return (nats * UNITS).nan_to_num(FARTHEST).clamp(max=FARTHEST).to(torch.int64)


def noise(vocabulary: int, state: SamplerState) -> Tensor:
    """Gumbel noise, float32 [B, vocabulary], of each row's next draw.

    ``-log(E)`` with E exponential, made of 32 random bits v as ``-log1p(-v)``: small E, which win, are then
    as finely divided as float32 allows.
    """
    return _gumbel(random_words(vocabulary, state))


def _gumbel(words: Tensor) -> Tensor:
    uniform = (words.float() * 2.0**-32 + 2.0**-33).clamp(max=_NEVER_ONE)
    return -torch.log(-torch.log1p(-uniform))


def random_words(vocabulary: int, state: SamplerState) -> Tensor:
    """32 random bits for each token of each row's next draw; int64 [B, vocabulary]."""
    fours = torch.arange(-(-vocabulary // 4), dtype=torch.int64, device=state.numbers.device)[None]
    words = _words_of_fours(fours.expand(state.numbers.shape[0], -1), state)
    return words.flatten(1)[:, :vocabulary]


def _words_of(ids: Tensor, state: SamplerState) -> Tensor:
    """As :func:`random_words`, for the tokens ``ids`` [B, n] alone."""
    return _words_of_fours(ids // 4, state).gather(-1, (ids % 4)[..., None])[..., 0]


def _words_of_fours(fours: Tensor, state: SamplerState) -> Tensor:
    """The words of the tokens 4 f to 4 f + 3 for each f of ``fours`` [B, n]; [B, n, 4]."""
    seed, stream = state.numbers[:, :1], state.numbers[:, 1:2]
    counter = (
        fours,
        state.drawn.to(torch.int64)[:, None].expand(fours.shape),
        stream.expand(fours.shape) & _LOW_32,
        torch.zeros_like(fours),
    )
    return torch.stack(philox(counter, (seed & _LOW_32, (seed >> 32) & _LOW_32)), dim=-1)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random words for each counter; words are int64 tensors of 32-bit values."""
    a, b, c, d = counter
    first, second = key
    for _ in range(10):
        # The products wrap in 64 bits, and their bits 32 to 63 are right all the same.
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (
            ((right >> 32) & _LOW_32) ^ b ^ first,
            right & _LOW_32,
            ((left >> 32) & _LOW_32) ^ d ^ second,
            left & _LOW_32,
        )
        first, second = (first + 0x9E3779B9) & _LOW_32, (second + 0xBB67AE85) & _LOW_32
    return a, b, c, d
