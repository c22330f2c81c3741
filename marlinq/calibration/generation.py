"""Calibration text that the model writes itself, so that nothing has to be downloaded.

The data-free recipe of LLM-QAT (Liu et al. 2023): every document starts from a random token and goes on with
what the model samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from marlinq.calibration.documents import MIN_TOKENS, Document
from marlinq.core.errors import NumericsError
from marlinq.core.progress import ReportProgress, no_progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
else:
    from marlinq.core.lazy import torch

_TOP_K = 50
_ROWS = 64


def generate_documents(
    model: nn.Module,
    config: Any,
    *,
    samples: int,
    max_length: int,
    seed: int,
    device: torch.device,
    temperature: float = 1.0,
    progress: ReportProgress = no_progress,
) -> list[Document]:
    """Lets a causal language model write ``samples`` documents.

    Args:
        model: a transformers causal language model with all weights on ``device``.
        config: its config, for the vocabulary and the special tokens.
        samples: number of documents.
        max_length: tokens a document has at most; one that draws the end token earlier ends there.
        seed: of every random choice.
        device: where the model is.
        temperature: of the sampling, among the 50 likeliest tokens.
        progress: called with ("writing text", tokens written by the longest rows, tokens in all).

    Raises:
        NumericsError: the model's logits are not finite.
    """
    text = config.get_text_config()
    generator = torch.Generator(device=device).manual_seed(seed)
    documents: list[Document] = []
    steps = -(-samples // _ROWS) * max_length
    for start in range(0, samples, _ROWS):
        rows = min(_ROWS, samples - start)

        def tick(length: int, start: int = start) -> None:
            progress("writing text", start // _ROWS * max_length + length, steps)

        documents.extend(_write_rows(model, text, rows, max_length, generator, temperature, tick))
    return documents


def _write_rows(
    model: nn.Module,
    config: Any,
    rows: int,
    max_length: int,
    generator: torch.Generator,
    temperature: float,
    tick: Callable[[int], None],
) -> list[Document]:
    from transformers import DynamicCache

    ends = _end_tokens(config)
    ids = _first_tokens(config, rows, generator)[:, :max_length]
    written = [row.tolist() for row in ids]
    alive = list(range(rows))
    cache = DynamicCache(config=config)
    with torch.no_grad():
        while alive and len(written[alive[0]]) < max_length:
            length = len(written[alive[0]])
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits[:, -1].float()
            if not bool(torch.isfinite(logits).all()):
                raise NumericsError(
                    "the model's logits are NaN or infinite as it writes calibration text; check its weights"
                )
            if length < MIN_TOKENS:
                logits[:, sorted(ends)] = float("-inf")
            drawn = _sample(logits, temperature, generator)
            tick(length + 1)
            going: list[int] = []
            for place, token in enumerate(drawn.tolist()):
                written[alive[place]].append(token)
                if token not in ends:
                    going.append(place)
            ids = drawn[:, None]
            if len(going) < len(alive):
                keep = torch.tensor(going, dtype=torch.int64, device=ids.device)
                ids = ids[keep]
                if going:
                    cache.batch_select_indices(keep)
                alive = [alive[place] for place in going]
    tick(max_length)
    return [Document(tuple(tokens)) for tokens in written]


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    values, tokens = logits.topk(min(_TOP_K, logits.shape[-1]), dim=-1)
    chosen = torch.multinomial(torch.softmax(values / temperature, dim=-1), 1, generator=generator)
    return tokens.gather(-1, chosen)[:, 0]


def _first_tokens(config: Any, rows: int, generator: torch.Generator) -> Tensor:
    """int64 [rows, 1 or 2]: the beginning token, where the model has one, and a random ordinary token."""
    vocabulary = config.vocab_size
    begin = config.bos_token_id
    special = {token for token in (begin, config.pad_token_id) if isinstance(token, int)} | _end_tokens(
        config
    )
    allowed = torch.ones(vocabulary, device=generator.device)
    allowed[sorted(token for token in special if 0 <= token < vocabulary)] = 0
    first = torch.multinomial(allowed, rows, replacement=True, generator=generator)[:, None]
    if isinstance(begin, int) and 0 <= begin < vocabulary:
        return torch.cat([torch.full_like(first, begin), first], dim=1)
    return first


def _end_tokens(config: Any) -> set[int]:
    end = config.eos_token_id
    tokens = end if isinstance(end, list) else [end]
    return {token for token in tokens if isinstance(token, int) and 0 <= token < config.vocab_size}
