"""Let a model write text, so that calibration and evaluation need no other text.

There are two ways to begin a document:

* **plain**, the data-free recipe of LLM-QAT (Liu et al. 2023): a random token, which the model continues;
* **chat**, that of Magpie (Xu et al. 2024): the chat template up to where a user's message begins. The model
  writes the message, the template closes it, and the model answers.

Documents are written in rounds of equal batches, decoded together over one cache and, on a GPU, with one
captured step. A round ends early when few of its rows have not ended; the text of those rows is kept. A
document ends where the model begins to repeat itself: small models fall into loops that they don't leave, and
text from loops teaches nothing about other text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from marlinq.calibration.documents import MIN_TOKENS
from marlinq.core import boundaries
from marlinq.core.errors import UnsupportedError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.runtime.decoding import Decoder
from marlinq.runtime.generation import end_tokens
from marlinq.runtime.loading import LoadedModel
from marlinq.runtime.sampling import Sampling
from marlinq.runtime.step.forward_choice import take_decoder

STAGE = "writing text"

TOP_K = 50
"""Default k of top-k sampling."""
_TEMPERATURE = 1.0
_MOST_ROWS = 128
_MESSAGE_TOKENS = 64
_FEW = 4
"""A round ends when less than 1 / _FEW of its rows have not ended."""
_FEWEST_ROUNDS = 64
"""Rounds that any model may take before writing fails."""
_SMALL_SHARE = 32
"""Writing fails if a model fills less than 1 / _SMALL_SHARE of the positions of its rounds. Without its loops
Qwen2.5-Coder-0.5B fills a third of 256 positions."""
_PROBE_STEPS = 3
_SEQUENCE, _REPEATED = 8, 24
"""A document ends when this many successive sequences of 8 tokens have each occurred in it before, and loses
as many tokens. None of 40 web pages has such a loop. Of 32 texts each, SmolLM2 and Gemma 3 270M wrote none
with a loop, and Qwen2.5-Coder-0.5B 23, with 63 % of the tokens in loops."""
_ENDED = 1200
"""Tokens by which three of four documents have ended: SmolLM2-135M-Instruct's, in documents of up to 2048."""
_MARK = "marlinq-message"


@dataclass(frozen=True)
class Written:
    """Documents that a model wrote.

    Attributes:
        documents: token ids of each document, with its beginning.
        rounds: batches that were decoded.
        loops: texts that ended where the model began to repeat itself, with those too short to keep.
        seconds: seconds in all, with compiling and capturing.
        how: name of the forward that decoded, and why.
    """

    documents: tuple[tuple[int, ...], ...]
    rounds: int
    loops: int
    seconds: float
    how: str


class TextWriter:
    """Writes documents with one decoder.

    Args:
        loaded: an unquantised or quantised model.
        rows: documents that are written together; at most 128.
        max_length: tokens that a document has at most.
        seed: seed of every random choice.
        chat: begin documents as conversations, instead of with a random token.
        top_k: k of top-k sampling; 0 samples from the whole vocabulary.
        otherwise: advice in the error of a model that writes too little text.
        progress: called with ("writing text", tokens written, tokens in all).

    Raises:
        UnsupportedError: ``chat`` is asked for, and the tokenizer has no chat template.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        rows: int,
        max_length: int,
        seed: int,
        chat: bool = False,
        top_k: int = TOP_K,
        otherwise: str = "take text from a file",
        progress: ReportProgress = no_progress,
    ) -> None:
        self._loaded, self._otherwise = loaded, otherwise
        self._rows = min(rows, _MOST_ROWS)
        self._max_length = max_length
        self._generator = torch.Generator().manual_seed(seed)
        self._sampling = Sampling(temperature=_TEMPERATURE, top_k=top_k, seed=seed)
        self._template = _Template(loaded) if chat else None
        self._progress = progress
        self._round = self._loops = self._shown = 0
        with boundaries.forward(loaded.path), loaded.decoders.lock:
            self._decoder = take_decoder(
                loaded,
                batch=self._rows,
                tokens=max_length,
                shape=self._sampling.shape,
                graphs=max_length > _PROBE_STEPS,
                progress=progress,
            )
            self._decoder.in_use = True
        self._ends = end_tokens(loaded.model, loaded.tokenizer)

    @property
    def how(self) -> str:
        """Which forward decodes, and why."""
        decision = self._decoder.decision
        return f"{decision.mode}: {decision.reason}"

    def report_to(self, progress: ReportProgress) -> None:
        """Report further progress to another function."""
        self._progress = progress

    def close(self) -> None:
        """Release the decoder."""
        self._decoder.stop()

    def seconds_a_step(self, behind: int = 2) -> float:
        """Seconds of one more token of every row, measured by a few steps that change nothing.

        Args:
            behind: tokens that every row holds already; at most three less than ``max_length``.
        """
        seconds = 0.0
        with boundaries.forward(self._loaded.path):
            # The first time something may be compiled, loaded or allocated.
            for _ in range(2):
                self._decoder.begin([(0, 0)] * self._rows, self._sampling)
                self._decoder.read()
                self._decoder.assume(behind)
                start = time.perf_counter()
                self._decoder.advance(_PROBE_STEPS)
                self._decoder.read()
                seconds = (time.perf_counter() - start) / _PROBE_STEPS
        return seconds

    def seconds_for(self, tokens: int) -> float:
        """Estimated seconds to write ``tokens``, from steps measured behind no tokens and behind a whole
        document.

        Attention costs more behind more tokens, and rows whose documents have ended still take steps. The
        number of rows that have not ended is assumed to fall linearly to the share at which a round ends.
        """
        steps, length = expected_steps(tokens, self._rows, self._max_length, ends=bool(self._ends))
        last = max(2, self._max_length - _PROBE_STEPS - 1)
        first, deep = self.seconds_a_step(), self.seconds_a_step(last)
        return steps * (first + max(0.0, deep - first) * (length / 2) / last)

    def write(self, *, tokens: int, documents: int | None = None) -> Written:
        """Writes until there are ``tokens`` tokens or ``documents`` documents.

        The last document is cut where the tokens are reached.

        Raises:
            NumericsError: the model's logits are NaN or infinite.
            UnsupportedError: the model ends nearly all of its documents at once, or in loops.
        """
        start = time.perf_counter()
        rows: list[tuple[int, ...]] = []
        total = 0
        first_round, first_loop = self._round, self._loops
        room_of_a_round = self._rows * self._max_length
        most = max(_FEWEST_ROUNDS, -(-_SMALL_SHARE * tokens // room_of_a_round))
        self._shown = 0
        self._progress(STAGE, 0, tokens)
        while total < tokens and (documents is None or len(rows) < documents):
            if self._round - first_round == most:
                raise UnsupportedError(
                    f"{self._loaded.path}: the model ends its documents at once, or repeats itself: {total} "
                    f"tokens in {most * self._rows} of them; {self._otherwise}"
                )
            for document in self._write_round(tokens, total):
                room = tokens - total
                cut = document[:room]
                if len(cut) < min(MIN_TOKENS, self._max_length, tokens):
                    continue
                rows.append(cut)
                total += len(cut)
                if total >= tokens or len(rows) == documents:
                    break
            if 0 < tokens - total < MIN_TOKENS:
                break
        self._progress(STAGE, tokens, tokens)
        return Written(
            tuple(rows),
            self._round - first_round,
            self._loops - first_loop,
            time.perf_counter() - start,
            self.how,
        )

    def _write_round(self, tokens: int, total: int) -> list[tuple[int, ...]]:
        """As many documents as there are rows."""
        prompts = self._plain_beginnings() if self._template is None else self._questions(self._template)

        def tick(written: int) -> None:
            # Documents that end in a loop lose tokens; progress does not go back.
            self._shown = max(self._shown, min(total + written, tokens))
            self._progress(STAGE, self._shown, tokens)

        # At least MIN_TOKENS a row, below which documents are not used.
        enough = max(tokens - total, self._rows * MIN_TOKENS)
        return self._continue(prompts, self._max_length, enough=enough, tick=tick)

    def _continue(
        self,
        prompts: Sequence[tuple[int, ...]],
        max_length: int,
        *,
        enough: int,
        shortest: int = MIN_TOKENS,
        tick: Callable[[int], None] = lambda written: None,
    ) -> list[tuple[int, ...]]:
        """The prompts, each with a continuation up to an end token, a loop or ``max_length`` tokens.

        All stop when few have not ended, or when there are ``enough`` tokens. An end token among the first
        ``shortest`` tokens is ignored, since such a short text is of no use.
        """
        rows = [_Row(list(prompt), len(prompt)) for prompt in prompts]
        # All rows take the same number of steps, which the longest prompt limits.
        steps = max_length - max(map(len, prompts))
        written = sum(map(len, prompts))
        if steps > 0:
            streams = range(self._round * self._rows, (self._round + 1) * self._rows)
            for step in self._steps(prompts, streams, steps):
                for row, token in zip(rows, step, strict=True):
                    if row.going:
                        row.tokens.append(token)
                        row.going = token not in self._ends or len(row.tokens) < shortest
                        lost = row.end_loop()
                        # Without a shortest length it is a question and not a document.
                        self._loops += lost > 0 and shortest > 0
                        written += 1 - lost
                tick(written)
                if written >= enough or sum(row.going for row in rows) * _FEW < len(rows):
                    break
        self._round += 1
        return [tuple(row.tokens) for row in rows]

    def _steps(
        self, prompts: Sequence[tuple[int, ...]], streams: Sequence[int], limit: int
    ) -> Iterator[list[int]]:
        """The tokens of every row, step after step."""
        decoder: Decoder = self._decoder
        with boundaries.forward(self._loaded.path):
            decoder.begin(prompts, self._sampling, streams)
        queued = 1
        while True:
            while queued < limit and decoder.pending < decoder.visits_at_once:
                steps = min(decoder.steps_a_visit, limit - queued)
                with boundaries.forward(self._loaded.path):
                    decoder.advance(steps)
                queued += steps
            if not decoder.pending:
                return
            with boundaries.forward(self._loaded.path):
                tokens = decoder.read()
            yield from tokens

    def _plain_beginnings(self) -> list[tuple[int, ...]]:
        """The beginning token, where the model has one, and a random ordinary token, for each row."""
        config = self._loaded.model.config.get_text_config()
        vocabulary, begin, padding = config.vocab_size, config.bos_token_id, config.pad_token_id
        allowed = torch.ones(vocabulary)
        for token in {begin, padding, *self._ends}:
            if isinstance(token, int) and 0 <= token < vocabulary:
                allowed[token] = 0
        drawn = torch.multinomial(allowed, self._rows, replacement=True, generator=self._generator)
        known = isinstance(begin, int) and 0 <= begin < vocabulary
        first = (begin,) if known else ()
        return [(*first, token)[: self._max_length] for token in drawn.tolist()]

    def _questions(self, template: _Template) -> list[tuple[int, ...]]:
        """Conversations up to where the answer begins, for each row."""
        beginning = template.beginning
        written = self._continue(
            [beginning] * self._rows,
            min(len(beginning) + _MESSAGE_TOKENS, self._max_length),
            enough=self._rows * self._max_length,
            shortest=0,
        )
        messages = [template.message(tokens[len(beginning) :]) for tokens in written]
        prompts = [template.question(message) for message in messages if message]
        usable = [prompt for prompt in prompts if len(prompt) < self._max_length]
        if not usable:
            raise UnsupportedError(
                f"{self._loaded.path}: asked for a user's message by its chat template, the model writes "
                f"none that leaves room for an answer in {self._max_length} tokens; leave out "
                "--chat-template, or raise --max-length"
            )
        # The same question twice gets two answers: rows draw from streams of their own.
        return [usable[row % len(usable)] for row in range(self._rows)]


def expected_steps(tokens: int, rows: int, max_length: int, *, ends: bool) -> tuple[float, float]:
    """Expected number of steps for ``tokens`` tokens, and steps of a round.

    Args:
        tokens: number of tokens of all documents.
        rows: number of rows written together.
        max_length: tokens of a document.
        ends: whether the model can end a document earlier.
    """
    share = min(1.0, max_length / _ENDED) if ends else 0.0
    going = 1 - share * (1 - 1 / _FEW) / 2
    steps = tokens / (rows * going)
    return steps, min(steps, max_length, _ENDED if ends else max_length)


@dataclass
class _Row:
    """A document under way.

    Attributes:
        tokens: its tokens so far.
        prompt: number of those that the model did not write.
        going: whether it has not ended.
        seen: sequences of tokens that the model has written.
        repeated: number of the last sequences that had been written before.
    """

    tokens: list[int]
    prompt: int
    going: bool = True
    seen: set[tuple[int, ...]] = field(default_factory=set)
    repeated: int = 0

    def end_loop(self) -> int:
        """Ends the document if its last token completes a loop; returns the number of tokens that it
        loses."""
        if len(self.tokens) < self.prompt + _SEQUENCE:
            return 0
        last = tuple(self.tokens[-_SEQUENCE:])
        self.repeated = self.repeated + 1 if last in self.seen else 0
        self.seen.add(last)
        if self.repeated < _REPEATED:
            return 0
        self.going = False
        del self.tokens[-_REPEATED:]
        return _REPEATED


class _Template:
    """The model's chat template, split at a user's message."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._tokenizer: Any = loaded.tokenizer
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise UnsupportedError(
                f"{loaded.path}: --chat-template: the model's tokenizer has no chat template; leave the "
                "option out, or name a file with a template"
            )
        before, mark, after = self._render(_MARK, answer=False).partition(_MARK)
        if not mark:
            raise UnsupportedError(
                f"{loaded.path}: --chat-template: the template leaves out a user's message; leave the option "
                "out, or name a file with another template"
            )
        self.beginning = self._encode(before)
        """Token ids of the template's text before a user's message; at least one."""
        if not self.beginning:
            raise UnsupportedError(
                f"{loaded.path}: --chat-template: the template writes nothing before a user's message, so "
                "the model has nothing to continue; leave the option out, or name a file with another "
                "template"
            )
        self._closing = after.strip().splitlines()[0].strip() if after.strip() else ""

    def message(self, tokens: Sequence[int]) -> str:
        """A user's message as the model wrote it, without what closes it."""
        with boundaries.tokenizer(self._loaded.path):
            # With the special tokens, since templates close a message with one.
            text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
            plain: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        if self._closing and self._closing in text:
            return text.partition(self._closing)[0].strip()
        return plain.strip()

    def question(self, message: str) -> tuple[int, ...]:
        """Token ids of a conversation up to where the answer begins."""
        return self._encode(self._render(message, answer=True))

    def _render(self, message: str, *, answer: bool) -> str:
        return boundaries.rendered(
            self._tokenizer,
            [{"role": "user", "content": message}],
            subject=str(self._loaded.path),
            advice="mend it, or take text from elsewhere with --calibration",
            add_generation_prompt=answer,
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        with boundaries.tokenizer(self._loaded.path):
            # The template has written the special tokens.
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
