"""Continuing a prompt: choosing tokens, stopping, and streaming their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from marlinq.core import boundaries
from marlinq.core.devices import read_clock
from marlinq.core.display import Block, Facts, Shown, lines
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import CheckpointError, NumericsError, UnsupportedError, UsageError
from marlinq.runtime.decoding import Decoder, StepDecision
from marlinq.runtime.linear import summarize
from marlinq.runtime.loading import LoadedModel

_CONTEXT_TOKENS = 8
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Generation(Shown):
    """A continuation and what it took.

    Attributes:
        text: the continuation, without the prompt.
        tokens: its token ids; ends with the end token when that was drawn.
        prompt_tokens: length of the prompt.
        stopped: ``eos`` (the end token), ``length`` (as many as asked for) or ``context`` (the model's
            position table is full).
        prefill_seconds: from the prompt to the first token.
        decode_seconds: for the tokens after the first.
        device: where it ran.
        dtype: of the activations.
        step: how decode steps ran, and why.
        notes: how the quantised linears were multiplied, and what else was said at load.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    stopped: Literal["eos", "length", "context"]
    prefill_seconds: float
    decode_seconds: float
    device: str
    dtype: str
    step: StepDecision
    notes: tuple[str, ...]

    @property
    def tokens_per_second(self) -> float:
        """Decode speed: tokens after the first over their time; 0 when there are none."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}

    def display(self) -> list[Block]:
        """The figures; the text itself is streamed, and not repeated."""
        prefill = self.prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0
        ended = {"eos": "the end token", "length": "the length asked for", "context": "no positions left"}
        rows = (
            ("generated", f"{len(self.tokens)} tokens, stopped by {ended[self.stopped]}"),
            ("decode", f"{self.tokens_per_second:.1f} tokens/s"),
            (
                "prompt",
                f"{self.prompt_tokens} tokens in {self.prefill_seconds:.3f} s, {prefill:.1f} tokens/s",
            ),
            ("steps", f"{self.step.mode}: {self.step.reason}"),
            ("device", f"{self.device}, {self.dtype}"),
        )
        return [Facts(rows), lines(*self.notes)]


class TextStream:
    """Turns token ids into text as they come, without ever breaking a character.

    A character may span several tokens, so text that ends in U+FFFD waits for the next token. Tokens are
    decoded together with some before them, since tokenizers treat the first one of a sequence differently.

    Args:
        tokenizer: a transformers tokenizer.
        context: tokens before the first, usually the prompt.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(context[-_CONTEXT_TOKENS:])
        self._start = 0
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
        before = self._decode(self._tokens[self._start : self._shown])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _advance(self) -> None:
        self._start = max(self._shown - _CONTEXT_TOKENS, 0)
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
    temperature: float | None = None,
    seed: int = 0,
    chat: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continues ``prompt``.

    Args:
        loaded: the model, from :func:`marlinq.runtime.load`.
        prompt: text, or token ids.
        max_new_tokens: at most this many; fewer when the end token is drawn or the positions run out.
        temperature: of the sampling; None takes the likeliest token every time.
        seed: of the sampling.
        chat: put the text into the tokenizer's chat template as a user's message.
        on_text: called with each piece of text as it comes.

    Raises:
        UsageError: an empty or too long prompt, or a token id that the model does not know.
        CheckpointError: text is given, or asked for, and the folder has no tokenizer.
        NumericsError: logits are NaN or infinite.
    """
    if max_new_tokens < 1:
        raise UsageError(f"max_new_tokens: expected 1 or more, found {max_new_tokens}")
    if temperature is not None and not temperature > 0:
        raise UsageError(f"temperature: expected more than 0, or none for greedy, found {temperature}")
    model = loaded.model
    ids = _prompt_ids(loaded, prompt, chat)
    room = _room(model, len(ids))
    limit = min(max_new_tokens, room)
    ends = end_tokens(model)
    with boundaries.forward(loaded.path):
        decoder = Decoder(model, max_length=len(ids) + limit, graphs=limit > 1)
    generator = torch.Generator().manual_seed(seed)
    stream = None if loaded.tokenizer is None else TextStream(loaded.tokenizer, ids)
    tokens: list[int] = []
    pieces: list[str] = []

    def emit(piece: str) -> None:
        if piece:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)

    start = read_clock(loaded.device)
    with boundaries.forward(loaded.path):
        logits = decoder.prefill(torch.tensor([ids], dtype=torch.int64, device=loaded.device))
    tokens.append(_choose(logits[0], temperature, generator))
    first = read_clock(loaded.device)
    while True:
        if tokens[-1] in ends:
            break
        if stream is not None:
            emit(stream.push(tokens[-1]))
        if len(tokens) == limit:
            break
        with boundaries.forward(loaded.path):
            logits = decoder.step(torch.tensor([tokens[-1]], dtype=torch.int64, device=loaded.device))
        tokens.append(_choose(logits[0], temperature, generator))
    last = read_clock(loaded.device)
    if stream is not None:
        emit(stream.finish())
    stopped: Literal["eos", "length", "context"] = "length" if limit == max_new_tokens else "context"
    return Generation(
        text="".join(pieces),
        tokens=tuple(tokens),
        prompt_tokens=len(ids),
        stopped="eos" if tokens[-1] in ends else stopped,
        prefill_seconds=first - start,
        decode_seconds=last - first,
        device=device_name(loaded.device),
        dtype=dtype_name(loaded.dtype),
        step=decoder.decision,
        notes=(*summarize(loaded.decisions.values()), *loaded.notes),
    )


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Every token id that ends a text, by the model's generation config and config."""
    found: set[int] = set()
    for holder in (model.generation_config, model.config.get_text_config()):
        ends = getattr(holder, "eos_token_id", None)
        found.update(end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int))
    return frozenset(found)


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
    if not chat:
        with boundaries.tokenizer(loaded.path):
            ids: list[int] = tokenizer(prompt)["input_ids"]
        return ids
    if not tokenizer.chat_template:
        raise UnsupportedError(
            f"{loaded.path}: the tokenizer has no chat template; continue plain text instead"
        )
    with boundaries.chat_template(loaded.path):
        encoded: Mapping[str, list[int]] = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )
        return encoded["input_ids"]


def _room(model: PreTrainedModel, prompt_tokens: int) -> int:
    limit = position_limit(model)
    if limit is None:
        return 1 << 62
    if prompt_tokens >= limit:
        raise UsageError(f"prompt: {prompt_tokens} tokens, the model has positions for {limit}; shorten it")
    return limit - prompt_tokens


def _choose(logits: Tensor, temperature: float | None, generator: torch.Generator) -> int:
    """The next token from logits [vocabulary]."""
    best, token = logits.max(dim=-1)
    if not bool(torch.isfinite(best)):
        raise NumericsError(
            "the model's logits are NaN or infinite; check its weights, or run in another --dtype"
        )
    if temperature is None:
        return int(token)
    # On the CPU one seed draws the same from the same logits on every machine.
    probabilities = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
