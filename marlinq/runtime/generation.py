"""Continuing a prompt: choosing tokens, stopping, and streaming their text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from marlinq.core import boundaries
from marlinq.core.devices import read_clock
from marlinq.core.display import Block, Facts, Shown, counted, lines
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import CheckpointError, UnsupportedError, UsageError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.core.safe_text import half_pair
from marlinq.runtime.decoding import Decoder, StepDecision
from marlinq.runtime.draft_layer import DraftLayer, has_draft_head
from marlinq.runtime.loading import LoadedModel
from marlinq.runtime.operator_choice import summarize
from marlinq.runtime.operators import OPERATORS
from marlinq.runtime.sampling import GREEDY, Sampling
from marlinq.runtime.speculation import LayerSpeculation, LookupSpeculation, Speculated, Speculation
from marlinq.runtime.step.forward_choice import draft_layer, take_decoder

_CONTEXT_TOKENS = 8
_REPLACEMENT = "\ufffd"


Speculate = Literal["auto", "mtp", "lookup", "off"]
"""Source of drafts. ``mtp``: the model's own draft head, even where drafting is slower; an error without one.
``lookup``: earlier places in the text where the last tokens stand. ``auto``: the draft head if it can be
used, else lookup, either only while it is faster."""
Stopped = Literal["eos", "text", "length", "context", "interrupt"]
_ENDED = {
    "eos": "the end token",
    "text": "a text that ends it",
    "length": "the length asked for",
    "context": "no positions left",
    "interrupt": "an interrupt",
}


@dataclass(frozen=True)
class Generation(Shown):
    """A continuation of a prompt, with times and facts of the run.

    Attributes:
        text: the continuation, without the prompt.
        tokens: token ids of the continuation, with the end token if it was drawn.
        prompt_tokens: tokens of the prompt.
        stopped: ``eos`` (the end token), ``text`` (one of ``until``), ``length`` (as many as requested),
            ``context`` (the model has no more positions) or ``interrupt``.
        prefill_seconds: seconds from the prompt to the first token, of the whole batch.
        decode_seconds: seconds for the tokens after the first, of the whole batch.
        device: name of the device.
        dtype: dtype of the activations.
        products: dtypes that products of quantised linears are rounded to where these are not ``dtype``.
        step: how decode steps ran, and why.
        drafts: counts of drafted and accepted tokens.
        notes: operators of the quantised linears, and other notes of the load.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    stopped: Stopped
    prefill_seconds: float
    decode_seconds: float
    device: str
    dtype: str
    products: tuple[str, ...]
    step: StepDecision
    drafts: Speculated
    notes: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over their time; 0 when there are none."""
        return max(len(self.tokens) - 1, 0) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}

    def display(self) -> list[Block]:
        """The figures; the text itself is streamed, and not repeated."""
        generated = f"{counted(len(self.tokens), 'tokens')}, stopped by {_ENDED[self.stopped]}"
        return _figures((self,), (("generated", generated),))

    def explain(self) -> list[Block]:
        """The notes: which operator multiplies the weights, and why."""
        return [lines(*self.notes)]


@dataclass(frozen=True)
class Generations(Shown):
    """Continuations of several prompts that were decoded together.

    Attributes:
        rows: one for each prompt, in order.
    """

    rows: tuple[Generation, ...]

    @property
    def tokens_per_second(self) -> float:
        """Decode speed of all rows together."""
        return sum(row.tokens_per_second for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "generations": [row.to_dict() for row in self.rows],
            "tokens_per_second": self.tokens_per_second,
        }

    def display(self) -> list[Block]:
        """Every text, then the figures."""
        texts = [lines(*f"[{number}] {row.text}".split("\n")) for number, row in enumerate(self.rows, 1)]
        rows = [
            (f"prompt {number}", f"{counted(len(row.tokens), 'tokens')}, stopped by {_ENDED[row.stopped]}")
            for number, row in enumerate(self.rows, 1)
        ]
        return [*texts, *_figures(self.rows, rows)]

    def explain(self) -> list[Block]:
        """The notes of the first row; they are the same for all."""
        return self.rows[0].explain()


class Interrupted(KeyboardInterrupt):
    """An interrupt while tokens were generated; the model can be used again.

    Attributes:
        partial: the result so far.
    """

    def __init__(self, partial: Generation | Generations) -> None:
        super().__init__("interrupted while generating")
        self.partial = partial


def _figures(rows: Sequence[Generation], first: Sequence[tuple[str, str]]) -> list[Block]:
    """Rows of figures that a batch shares, behind those of ``first``."""
    one = rows[0]
    prompt_tokens = sum(row.prompt_tokens for row in rows)
    prefill = prompt_tokens / one.prefill_seconds if one.prefill_seconds > 0 else 0.0
    shared = (
        ("decode", f"{sum(row.tokens_per_second for row in rows):.1f} tokens/s"),
        (
            "prompt",
            f"{counted(prompt_tokens, 'tokens')} in {one.prefill_seconds:.3f} s, {prefill:.1f} tokens/s",
        ),
        ("steps", f"{one.step.mode}: {one.step.reason}"),
        ("drafts", str(one.drafts)),
        ("device", ", ".join((one.device, one.dtype, *(f"products in {each}" for each in one.products)))),
    )
    return [Facts((*first, *shared))]


def _products(loaded: LoadedModel) -> tuple[str, ...]:
    """Dtypes other than the activations' that operators round products to."""
    rounded = {OPERATORS[decision.operator].rounds_to for decision in loaded.decisions.values()}
    return tuple(sorted(each for each in rounded if each not in (None, dtype_name(loaded.dtype))))


class TextStream:
    """Decodes tokens to text one by one, without breaking characters.

    A character may span several tokens, so text that ends in U+FFFD waits for the next token. Tokens are
    decoded together with a few earlier ones, since tokenizers treat the first token of a sequence
    differently.

    Args:
        tokenizer: a transformers tokenizer.
        context: tokens before the first, usually the prompt.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(context[-_CONTEXT_TOKENS:])
        self._shown = len(self._tokens)

    def push(self, token: int) -> str:
        """The text that ``token`` completes; empty while a character is unfinished."""
        self._tokens.append(token)
        text = self._pending()
        if text.endswith(_REPLACEMENT):
            return ""
        self._advance()
        return text

    def finish(self) -> str:
        """Whatever is left, an unfinished character as U+FFFD."""
        text = self._pending()
        self._advance()
        return text

    def _pending(self) -> str:
        before = self._decode(self._tokens[: self._shown])
        return self._decode(self._tokens)[len(before) :]

    def _advance(self) -> None:
        # Tokens whose text was returned become context, of which the last few suffice.
        del self._tokens[: max(self._shown - _CONTEXT_TOKENS, 0)]
        self._shown = len(self._tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        with boundaries.tokenizer(self._tokenizer):
            text: str = self._tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text


def generate(
    loaded: LoadedModel,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = GREEDY,
    chat: bool = False,
    speculate: Speculate = "auto",
    on_text: Callable[[str], None] | None = None,
    progress: ReportProgress = no_progress,
) -> Generation:
    """Continues ``prompt``.

    Args:
        loaded: the model, from :func:`marlinq.runtime.load`.
        prompt: text, or token ids.
        max_new_tokens: at most this many; fewer when the end token is drawn or the positions run out.
        sampling: how tokens are chosen; the checkpoint's generation config is ignored.
        chat: put the text into the tokenizer's chat template as a user's message.
        speculate: source of drafted tokens, checked several at a time. The text is the same, unless
            products of several rows round differently from those of one.
        on_text: called with each piece of text.
        progress: called after each kernel that is compiled, before any text comes.

    Raises:
        UsageError: an empty or too long prompt, or a token id that the model does not know.
        CheckpointError: text is given, or asked for, and the folder has no tokenizer.
        NumericsError: logits are NaN or infinite.
        UnsupportedError: ``mtp`` is asked for, and the model has no draft head that can be used.
        Interrupted: a KeyboardInterrupt while tokens were generated.
    """
    rows = _generate(
        loaded,
        [prompt],
        max_new_tokens,
        sampling,
        chat,
        on_text,
        progress,
        alone=True,
        speculate=speculate,
    )
    return rows[0]


def generate_batch(
    loaded: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = GREEDY,
    chat: bool = False,
    until: Sequence[str] = (),
    progress: ReportProgress = no_progress,
) -> Generations:
    """As :func:`generate`, for several prompts of any lengths, decoded together until the last one has ended.

    Each row sees its own tokens only. Row n draws from stream n of the seed's random numbers, whatever the
    other rows are. All end where the longest prompt runs out of positions. A row also ends with the token
    that completes one of the texts ``until``, which needs the folder's tokenizer.

    Raises:
        UsageError: there are no prompts, or as :func:`generate`.
        CheckpointError: as :func:`generate`.
        NumericsError: as :func:`generate`.
        UnsupportedError: the prompts differ in length, and the model has layers that can't be told to ignore
            padding.
        Interrupted: as :func:`generate`.
    """
    if not prompts:
        raise UsageError("prompts: expected at least one, found none")
    rows = _generate(
        loaded, prompts, max_new_tokens, sampling, chat, None, progress, until=until, speculate="lookup"
    )
    return Generations(tuple(rows))


@dataclass
class _Row:
    """A prompt and its continuation so far.

    Attributes:
        ids: token ids of the prompt.
        stream: decoder of tokens to text; None without a tokenizer.
        tokens, pieces: tokens and pieces of text so far.
        stopped: why the row has ended; None while it goes on.
    """

    ids: list[int]
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    stopped: Stopped | None = None

    def push(self, token: int) -> str:
        """Append a token, not an end token; returns the text that it completes."""
        self.tokens.append(token)
        return self._keep("" if self.stream is None else self.stream.push(token))

    def has(self, texts: Sequence[str]) -> bool:
        """Whether the text so far contains one of ``texts``."""
        return bool(texts) and any(text in "".join(self.pieces) for text in texts)

    def stop(self, why: Stopped) -> str:
        """End the row; returns text that was waiting for the rest of a character."""
        self.stopped = why
        return self._keep("" if self.stream is None else self.stream.finish())

    def _keep(self, piece: str) -> str:
        if piece:
            self.pieces.append(piece)
        return piece


def _generate(
    loaded: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    chat: bool,
    on_text: Callable[[str], None] | None,
    progress: ReportProgress,
    *,
    alone: bool = False,
    speculate: Speculate = "off",
    until: Sequence[str] = (),
) -> list[Generation]:
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens: expected 1 or more, found {max_new_tokens}")
    rows = []
    for prompt in prompts:
        ids = _prompt_ids(loaded, prompt, chat)
        rows.append(_Row(ids, None if loaded.tokenizer is None else TextStream(loaded.tokenizer, ids)))
    longest = max(len(row.ids) for row in rows)
    # All rows take the same steps, so the longest prompt limits them all.
    limit = min(max_new_tokens, _room(loaded.model, longest))
    layer: DraftLayer | str = "not asked for"
    if speculate in ("auto", "mtp"):
        with boundaries.forward(loaded.path):
            layer = draft_layer(loaded)
    with boundaries.forward(loaded.path), loaded.decoders.lock:
        decoder = take_decoder(
            loaded,
            batch=len(rows),
            tokens=longest + limit,
            shape=sampling.shape,
            graphs=limit > 1,
            layer=None if isinstance(layer, str) else layer,
            progress=progress,
        )
        decoder.in_use = True
    refusal = "not asked for"
    if speculate != "off":
        with boundaries.forward(loaded.path):
            refusal = decoder.prepare_drafts()
    drafter, hidden = decoder.forward.drafter, decoder.forward.hidden_states
    if speculate == "mtp" and (refusal or drafter is None):
        decoder.in_use = False
        reason = layer if isinstance(layer, str) else refusal or decoder.forward.reason
        raise UnsupportedError(f"{loaded.path}: drafts of the model's own: {reason}; use another --speculate")
    speculation: Speculation | None = None
    if not refusal:
        most, cost = decoder.most_drafted, decoder.forward.verification_cost
        if drafter is None or hidden is None:
            speculation = LookupSpeculation(rows[0].ids, most, cost)
        else:
            always = speculate == "mtp"
            speculation = LayerSpeculation(rows[0].ids, drafter, hidden, most, cost, always=always)
    ends = end_tokens(loaded.model, loaded.tokenizer)
    start = read_clock(loaded.device)
    first = last = start
    interrupted = False
    try:
        for number, step in enumerate(_steps(loaded, decoder, rows, sampling, limit, speculation), 1):
            # Measured before the text is decoded, while the device works on later steps.
            last = time.perf_counter()
            first = last if number == 1 else first
            for row, token in zip(rows, step, strict=True):
                if row.stopped is not None:
                    continue
                if token in ends:
                    row.tokens.append(token)
                    piece = row.stop("eos")
                else:
                    piece = row.push(token)
                    if piece and row.has(until):
                        piece += row.stop("text")
                    elif number == limit:
                        piece += row.stop("length" if limit == max_new_tokens else "context")
                if piece and on_text is not None:
                    on_text(piece)
            if all(row.stopped is not None for row in rows):
                break
    except KeyboardInterrupt:
        interrupted = True
        for row in rows:
            if row.stopped is None:
                row.stop("interrupt")
    finally:
        decoder.stop()
    drafts = Speculated(0, 0, 0, refusal) if speculation is None else speculation.result()
    notes = [*summarize(loaded.decisions.values()), *loaded.notes]
    if speculate == "auto" and isinstance(layer, str) and has_draft_head(loaded):
        notes.append(f"the checkpoint's draft head is not used: {layer}")
    done = [
        Generation(
            text="".join(row.pieces),
            tokens=tuple(row.tokens),
            prompt_tokens=len(row.ids),
            stopped=row.stopped or "length",
            prefill_seconds=first - start,
            decode_seconds=last - first,
            device=device_name(loaded.device),
            dtype=dtype_name(loaded.dtype),
            products=_products(loaded),
            step=decoder.decision,
            drafts=drafts,
            notes=tuple(notes),
        )
        for row in rows
    ]
    if interrupted:
        raise Interrupted(done[0] if alone else Generations(tuple(done)))
    return done


def _steps(
    loaded: LoadedModel,
    decoder: Decoder,
    rows: Sequence[_Row],
    sampling: Sampling,
    limit: int,
    speculation: Speculation | None,
) -> Iterator[list[int]]:
    """The tokens of every row, step after step; later steps are queued before earlier ones are given out.

    With ``speculation`` of a single row, drafts are checked instead while they are promising.
    """
    with boundaries.forward(loaded.path):
        decoder.begin([row.ids for row in rows], sampling)
    queued, visit, last = 1, 1, -1

    def room() -> int:
        """Number of tokens that may be drafted now."""
        return min(decoder.drafted_room, limit - queued - 1)

    def start_draft() -> None:
        """Begin the next draft before the host decodes text, if one is due."""
        if speculation is not None and speculation.promising and not decoder.pending and queued < limit:
            with boundaries.forward(loaded.path):
                speculation.start(room())

    while True:
        drafting = speculation is not None and speculation.promising
        while not drafting and queued < limit and decoder.pending < decoder.visits_at_once:
            steps = min(visit, limit - queued)
            with boundaries.forward(loaded.path):
                decoder.advance(steps)
            queued += steps
            # Short visits at first, so that the first text appears soon.
            visit = min(2 * visit, decoder.steps_a_visit)
        if speculation is not None and drafting and not decoder.pending and queued < limit:
            draft = speculation.draft(room())
            with boundaries.forward(loaded.path):
                if draft:
                    checked = decoder.verify(last, draft)
                else:
                    decoder.advance(1)
            if draft:
                speculation.checked(draft, checked)
                queued, last = queued + len(checked), checked[-1]
                start_draft()
                yield from ([token] for token in checked)
                continue
            queued += 1
        if not decoder.pending:
            return
        with boundaries.forward(loaded.path):
            tokens = decoder.read()
        last = tokens[-1][0]
        if speculation is not None:
            for step in tokens:
                speculation.came(step[0])
        start_draft()
        yield from tokens


def end_tokens(model: PreTrainedModel, tokenizer: Any | None) -> frozenset[int]:
    """Every token id that ends a text, by the model's generation config and config; where both name none, the
    tokenizer's."""
    tokens: set[int] = set()
    for holder in (model.generation_config, model.config.get_text_config()):
        ends = getattr(holder, "eos_token_id", None)
        tokens.update(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))
    if not tokens and tokenizer is not None and isinstance(tokenizer.eos_token_id, int):
        tokens.add(tokenizer.eos_token_id)
    return frozenset(tokens)


def position_limit(model: PreTrainedModel) -> int | None:
    """Tokens that the model has positions for; None when its config states no bound."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def device_name(device: torch.device) -> str:
    """The device with the GPU's name, for reports."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _prompt_ids(loaded: LoadedModel, prompt: str | Sequence[int], chat: bool) -> list[int]:
    if isinstance(prompt, str):
        ids = _encode(loaded, prompt, chat)
    elif chat:
        raise UsageError("chat: a chat template needs the prompt as text, found token ids")
    else:
        ids = list(prompt)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    if not ids:
        raise UsageError("prompt: expected at least one token, found none")
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise UsageError(f"prompt: token ids must lie in 0..{vocabulary - 1}, found {min(ids)}..{max(ids)}")
    return ids


def _encode(loaded: LoadedModel, prompt: str, chat: bool) -> list[int]:
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise CheckpointError(f"{loaded.path}: no tokenizer; add its files, or pass token ids")
    if (half := half_pair(prompt)) is not None:
        raise UsageError(f"prompt: {half} is half of a surrogate pair, which is no text; pass UTF-8")
    if not chat:
        with boundaries.tokenizer(loaded.path):
            ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids
    if not tokenizer.chat_template:
        raise UnsupportedError(
            f"{loaded.path}: the tokenizer has no chat template; continue plain text instead"
        )
    text = boundaries.rendered(
        tokenizer,
        [{"role": "user", "content": prompt}],
        subject=str(loaded.path),
        advice="mend it, or continue plain text",
        add_generation_prompt=True,
    )
    with boundaries.tokenizer(loaded.path):
        # The template has written the special tokens.
        written: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return written


def _room(model: PreTrainedModel, prompt_tokens: int) -> int:
    limit = position_limit(model)
    if limit is None:
        return 1 << 62
    if prompt_tokens >= limit:
        raise UsageError(
            f"prompt: {counted(prompt_tokens, 'tokens')}, the model has positions for {limit}; shorten it"
        )
    return limit - prompt_tokens
