"""Decode tokens: a step and its sampler, eager or as a replayed CUDA graph, several steps for each host
visit."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from marlinq.core.errors import NumericsError
from marlinq.runtime.sampling import FAULT, GREEDY, RING, Sampler, SamplerShape, Sampling
from marlinq.runtime.step.forward import Forward

# Largest relative difference between the logits of a captured and of an eager step. Both run the same
# kernels, so they differ only by rounding where a kernel sums in another order. State frozen at capture by
# mistake would change them by tens of per cent.
_REPLAY_TOLERANCE = 0.03
_PROBE_TOKENS = 4
_MAX_STEPS = 8
"""Steps queued by a host visit at most. Two visits are queued at once, so up to twice as many steps are
wasted when a text ends."""
_KEPT_DECODERS = 4
# Positions of the smallest cache. All capacities are multiples of 64, since attention kernels need aligned
# rows of their mask.
_SMALLEST_CAPACITY = 256


@dataclass(frozen=True)
class StepDecision:
    """Whether decode steps are replayed from a CUDA graph, and why."""

    mode: Literal["cuda-graph", "eager"]
    reason: str


class _Visit(NamedTuple):
    """Queued steps whose tokens the host will fetch together.

    Attributes:
        first: number of the first token.
        steps: tokens of each row.
        done: event behind the copy of the tokens to the host; None on a CPU.
    """

    first: int
    steps: int
    done: torch.cuda.Event | None


class Decoder:
    """Decodes a batch of prompts step by step; the host fetches tokens later.

    :meth:`begin` reads prompts and chooses the first tokens, :meth:`advance` appends steps, each of which
    embeds the tokens that the previous one has chosen, and :meth:`read` waits for the oldest tokens that have
    not been fetched. On a GPU all but ``read`` only queue work: tokens gather in a ring on the device and are
    copied to pinned memory, so the host may decode text while later steps run. A step and its sampler are
    captured into a CUDA graph once, where the forward allows it; ``decision`` says which way was taken.

    Args:
        forward: forward that computes logits.
        shape: operations of the sampler: random draws, filters, a penalty.
        graphs: False keeps CUDA steps eager.

    Attributes:
        in_use: whether a generation uses the decoder, from its beginning until :meth:`stop`.
        most_drafted: tokens that :meth:`verify` checks at most; 0 before :meth:`prepare_drafts`, or if that
            refuses.
    """

    def __init__(self, forward: Forward, shape: SamplerShape = GREEDY.shape, *, graphs: bool = True) -> None:
        self.forward = forward
        self.shape = shape
        self.in_use = False
        self.device = forward.device()
        self._sampler: Sampler | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor | None = None
        self._visits: deque[_Visit] = deque()
        self._chosen = 0
        self._prompt_tokens = 0
        self._begun: tuple[Sampling, Sequence[Sequence[int]], Sequence[int]] | None = None
        # Number of tokens to verify -> sampler with a row for each; and the numbers whose samplers have begun
        # with the present prompt and seed.
        self._verifiers: dict[int, Sampler] = {}
        self._verifiers_begun: set[int] = set()
        self._verification: _Verification | None = None
        on_gpu = self.device.type == "cuda"
        self._host_ring = torch.zeros((RING, forward.batch), dtype=torch.int64, pin_memory=on_gpu)
        refusal = self._prepare(graphs)
        self.decision = StepDecision(
            "eager" if refusal else "cuda-graph",
            f"{refusal or 'one captured step is replayed for each token'}; {forward.reason}",
        )
        self.most_drafted = 0
        self._drafts_refusal: str | None = None

    @property
    def visits_at_once(self) -> int:
        """Visits worth queueing before the oldest is read: the device works on one while the host reads."""
        return 1 if self.device.type == "cpu" else 2

    @property
    def steps_a_visit(self) -> int:
        """Steps worth queueing together; once a row has ended, its queued steps are wasted."""
        return 1 if self._graph is None else _MAX_STEPS

    @property
    def pending(self) -> int:
        """Number of queued visits that have not been read."""
        return len(self._visits)

    @torch.no_grad()
    def begin(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling = GREEDY,
        streams: Sequence[int] | None = None,
    ) -> None:
        """Clear the cache, read ``prompts`` and choose the first token of each row.

        Args:
            prompts: token ids of every row, one at least.
            sampling: settings of this decoder's shape.
            streams: random stream of each row; its index if None.
        """
        self._forget_visits()
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
        ids = torch.zeros((len(prompts), int(lengths.max())), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        with self._here():
            logits = self.forward.prefill(ids.to(self.device), lengths)
            sampler = self._sampler_for(logits)
            streams = range(len(prompts)) if streams is None else streams
            sampler.begin(sampling, prompts, streams)
            sampler.sample(logits)
            self._begun = sampling, prompts, streams
            self._prompt_tokens = len(prompts[0])
            self._verifiers_begun.clear()
            self._chosen = 0
            self._leave(1)

    @torch.no_grad()
    def advance(self, steps: int = 1) -> None:
        """Queue ``steps`` more steps; unread tokens, these included, must fit the ring."""
        assert self._sampler is not None, "begin comes first"
        with self._here():
            for _ in range(steps):
                if self._graph is not None:
                    self._graph.replay()
                else:
                    self._sampler.sample(self.forward.step(self._sampler.state.tokens))
            self._leave(steps)

    def prepare_drafts(self) -> str:
        """Prepare :meth:`verify`; :meth:`begin` must be called after it.

        Returns:
            Why :meth:`verify` can't be used; empty if it can.
        """
        if self._drafts_refusal is None:
            self._drafts_refusal = self._refuse_drafts()
            self.most_drafted = 0 if self._drafts_refusal else self.forward.most_verified - 1
        return self._drafts_refusal

    @property
    def drafted_room(self) -> int:
        """Tokens that :meth:`verify` may check now, limited by the room in the cache."""
        # On a GPU a captured verification always has the same number of rows.
        room = self.forward.capacity - (self._prompt_tokens + self._chosen - 1)
        if self.device.type == "cuda":
            return self.most_drafted if room > self.most_drafted else 0
        return max(0, min(self.most_drafted, room - 1))

    @torch.no_grad()
    def verify(self, last: int, draft: Sequence[int]) -> list[int]:
        """Check drafted tokens in one forward, for a batch of one with nothing pending.

        Each token is drawn with the random numbers that its own step would use, so the text does not depend
        on drafts.

        Args:
            last: the last chosen token.
            draft: guesses of the next tokens, 1 to :attr:`drafted_room`.

        Returns:
            The tokens of ``draft`` up to the first that steps would not have chosen, and the token that steps
            would choose next.

        Raises:
            NumericsError: logits were NaN or infinite.
        """
        assert self._sampler is not None, "begin comes first"
        assert not self._visits, "steps are under way"
        assert 0 < len(draft) <= self.drafted_room, f"{len(draft)} tokens of at most {self.drafted_room}"
        tokens = [last, *draft]
        with self._here():
            rows = len(tokens) if self._verification is None else self.forward.most_verified
            sampler = self._verifier(rows)
            sampler.state.drawn.copy_(torch.arange(self._chosen, self._chosen + rows, dtype=torch.int32))
            # Unused rows of a captured verification repeat the last token, which needs no further experts.
            padded = torch.tensor(tokens + tokens[-1:] * (rows - len(tokens)), dtype=torch.int64)
            if self._verification is None:
                sampler.sample(self.forward.verify(padded.to(self.device)))
            else:
                self._verification.tokens.copy_(padded)
                self._verification.graph.replay()
            ring = sampler.state.ring.cpu()
        chosen = [int(ring[(self._chosen + row) % RING, row]) for row in range(len(tokens))]
        right = next((row for row, token in enumerate(draft) if chosen[row] != token), len(draft))
        new = chosen[: right + 1]
        _check_faults([new])
        self._chosen += len(new)
        with self._here():
            self.forward.accept(self._prompt_tokens + self._chosen - 1)
            self._sampler.state.drawn.fill_(self._chosen)
            self._sampler.state.tokens.fill_(new[-1])
        return new

    def _verifier(self, rows: int) -> Sampler:
        """A sampler whose ``rows`` rows are successive draws of the batch's only row."""
        assert self._sampler is not None
        if rows not in self._verifiers:
            self._verifiers[rows] = Sampler(self.shape, rows, self._sampler.vocabulary, self.device)
        sampler = self._verifiers[rows]
        if rows not in self._verifiers_begun and self._begun is not None:
            sampling, prompts, streams = self._begun
            sampler.begin(sampling, [prompts[0]] * rows, [streams[0]] * rows)
            self._verifiers_begun.add(rows)
        return sampler

    def assume(self, length: int) -> None:
        """Make further steps as slow as behind ``length`` tokens, for timing; their tokens are meaningless
        until the next :meth:`begin`. See :meth:`marlinq.runtime.step.forward.Forward.assume`."""
        with self._here():
            self.forward.assume(length)

    def read(self) -> list[list[int]]:
        """Wait for the oldest unread visit; returns a token of every row for each of its steps.

        Raises:
            NumericsError: a row's logits were NaN or infinite.
        """
        visit = self._visits.popleft()
        if visit.done is not None:
            visit.done.synchronize()
        numbers = range(visit.first, visit.first + visit.steps)
        tokens: list[list[int]] = [self._host_ring[number % RING].tolist() for number in numbers]
        _check_faults(tokens)
        return tokens

    def stop(self) -> None:
        """Wait for queued steps and discard their tokens; :meth:`begin` may follow, also after an
        interrupt."""
        self._forget_visits()
        self.in_use = False

    def _forget_visits(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._visits.clear()

    def _here(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _leave(self, steps: int) -> None:
        """Queue the copy of the last ``steps`` tokens to the host."""
        assert self._sampler is not None
        ring = self._sampler.state.ring
        first, last = self._chosen, self._chosen + steps
        oldest = self._visits[0].first if self._visits else first
        assert last - oldest <= RING, "more tokens than the ring holds"
        self._chosen = last
        while first < last:
            start = first % RING
            end = min(start + last - first, RING)
            self._host_ring[start:end].copy_(ring[start:end], non_blocking=True)
            first += end - start
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self.device))
        self._visits.append(_Visit(last - steps, steps, done))

    def _sampler_for(self, logits: Tensor) -> Sampler:
        if self._sampler is None:
            self._sampler = Sampler(self.shape, self.forward.batch, logits.shape[1], logits.device)
        return self._sampler

    @torch.no_grad()
    def _prepare(self, graphs: bool) -> str:
        """Capture a step and check its logits; returns why steps stay eager, or an empty text."""
        if self.device.type != "cuda":
            return f"CUDA graphs need a GPU; this is {self.device.type}"
        if not graphs:
            return "eager steps were asked for"
        if not self.forward.capturable:
            return "these steps can't be captured"
        # Capturing runs one step more than the probe.
        if self.forward.capacity <= _PROBE_TOKENS:
            return "too few tokens to be worth a capture"
        with self._here():
            expected = self._probe()
            try:
                self._capture()
                replayed = self._probe()
            except RuntimeError as error:
                self._graph = None
                reason = " ".join(str(error).split())[:160]
                return f"the step could not be captured into a CUDA graph ({reason})"
        difference = float((replayed - expected).norm() / expected.norm())
        if not difference <= _REPLAY_TOLERANCE:
            self._graph = None
            return f"a captured step gave wrong logits (relative error {difference:.2g})"
        return ""

    def _probe(self) -> Tensor:
        """Logits, float32, after two steps behind prompts of one and two tokens in turn."""
        logits = self.forward.prefill(*self._probe_prompts())
        tokens = self._sampler_for(logits).state.tokens
        for token in (2, 3):
            tokens.fill_(token)
            if self._graph is None or self._logits is None:
                logits = self.forward.step(tokens)
            else:
                self._graph.replay()
                logits = self._logits
        return logits.float().clone()

    def _probe_prompts(self) -> tuple[Tensor, Tensor]:
        """Prompts [B, 2] of tokens 0 and 1, and their lengths: two and one in turn."""
        ids = torch.arange(2, device=self.device).repeat(self.forward.batch, 1)
        return ids, 2 - torch.arange(self.forward.batch, dtype=torch.int32) % 2

    def _capture(self) -> None:
        sampler = self._sampler
        assert sampler is not None
        tokens = sampler.state.tokens
        tokens.zero_()
        self._graph, self._logits = self._captured(lambda: self.forward.step(tokens), sampler)

    def _refuse_drafts(self) -> str:
        """Why drafts can't be checked, or an empty text; captures a verification if steps are captured."""
        forward = self.forward
        if forward.batch > 1:
            return f"{forward.batch} texts are decoded together"
        if not forward.most_verified:
            return "the model's steps take one token at a time"
        if self.shape.penalty:
            return "a repetition penalty counts every token before the next"
        if self.device.type != "cuda":
            return ""
        if self._graph is None or forward.capacity < _PROBE_TOKENS + forward.most_verified:
            return "the step is not captured"
        return self._prepare_verification()

    @torch.no_grad()
    def _prepare_verification(self) -> str:
        """Capture a verification and check its logits against steps'; returns why not, or an empty text."""
        rows = self.forward.most_verified
        tokens = torch.zeros(rows, dtype=torch.int64, device=self.device)
        with self._here():
            expected = self._probe()
            sampler = self._verifier(rows)
            try:
                graph, logits = self._captured(lambda: self.forward.verify(tokens), sampler)
                # Recurrent states have to be those behind the prompt again.
                self.forward.prefill(*self._probe_prompts())
                tokens.copy_(torch.arange(_PROBE_TOKENS - 2, _PROBE_TOKENS - 2 + rows))
                graph.replay()
            except RuntimeError as error:
                return f"a verification could not be captured ({' '.join(str(error).split())[:160]})"
        difference = float((logits[1].float() - expected[0]).norm() / expected[0].norm())
        if not difference <= self.forward.verification_tolerance:
            return f"a verification gave other logits than steps (relative error {difference:.2g})"
        self._verification = _Verification(graph, tokens)
        return ""

    def _captured(
        self, compute: Callable[[], Tensor], sampler: Sampler
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """A graph that computes logits and samples from them, and those logits."""
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            # Run once outside the graph: kernels are compiled and loaded, and memory allocated, at first use.
            sampler.sample(compute())
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = compute()
            sampler.sample(logits)
        return graph, logits


class _Verification(NamedTuple):
    """A captured verification.

    Attributes:
        graph: graph that computes logits and samples from them.
        tokens: int64 [R], input of the graph: tokens that it appends.
    """

    graph: torch.cuda.CUDAGraph
    tokens: Tensor


def _check_faults(tokens: Sequence[Sequence[int]]) -> None:
    if any(FAULT in row for row in tokens):
        raise NumericsError(
            "the model's logits are NaN or infinite; check its weights, or run in another --dtype"
        )


class Decoders:
    """The most recently used decoders of one model, each with its cache and graph.

    A decoder in use is not given out again: a generation from another thread, or from within a callback, gets
    another one.

    Attributes:
        lock: held from taking a decoder until it is marked as in use.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._kept: OrderedDict[tuple[int, int, SamplerShape, bool, bool], Decoder] = OrderedDict()

    def take(
        self,
        make_forward: Callable[[int, int], Forward],
        *,
        batch: int,
        tokens: int,
        limit: int | None = None,
        shape: SamplerShape = GREEDY.shape,
        graphs: bool = True,
        drafts: bool = False,
    ) -> Decoder:
        """A decoder whose rows can hold ``tokens``; a new one if no kept one fits.

        Args:
            make_forward: makes a forward of (batch, capacity).
            batch: rows.
            tokens: largest number of tokens of a row, prompt included.
            limit: largest capacity, unless ``tokens`` is larger.
            shape: operations of the sampler: random draws, filters, a penalty.
            graphs: False keeps CUDA steps eager.
            drafts: whether ``make_forward`` makes forwards with a draft head.
        """
        wanted = capacity_class(tokens)
        if limit is not None and tokens <= limit:
            wanted = min(wanted, limit)
        largest = 2 * wanted if limit is None or tokens > limit else min(2 * wanted, limit)
        kind = shape, graphs, drafts
        fitting = [
            key
            for key in self._kept
            if key[0] == batch
            and tokens <= key[1] <= largest
            and key[2:] == kind
            and not self._kept[key].in_use
        ]
        if fitting:
            key = min(fitting, key=lambda each: each[1])
            self._kept.move_to_end(key)
            return self._kept[key]
        # Before a new decoder allocates memory, drop one that it can replace, or else the least recently
        # used.
        for key in [key for key in self._kept if key[0] == batch and key[2:] == kind]:
            if key[1] < wanted:
                del self._kept[key]
        while len(self._kept) >= _KEPT_DECODERS:
            self._kept.popitem(last=False)
        decoder = None
        try:
            decoder = Decoder(make_forward(batch, wanted), shape, graphs=graphs)
        except torch.cuda.OutOfMemoryError:
            if not self._kept:
                raise
        if decoder is None:
            # Retried outside of the except block, whose traceback would keep the memory of the first attempt.
            self.clear()
            decoder = Decoder(make_forward(batch, wanted), shape, graphs=graphs)
        self._kept[batch, wanted, *kind] = decoder
        return decoder

    def clear(self) -> None:
        """Free the memory of all decoders that are not in use."""
        self._kept.clear()


def capacity_class(tokens: int) -> int:
    """Capacity of a cache for ``tokens`` tokens: the next of 256, 320, 384, 448, 512, 640, ...

    Four sizes for each doubling, so that few graphs serve every length and at most about a quarter is unused.
    """
    octave = _SMALLEST_CAPACITY
    while 2 * octave < tokens:
        octave *= 2
    step = octave // 4
    return max(octave, -(-tokens // step) * step)
