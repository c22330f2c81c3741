"""Token windows to evaluate on: from a text file, a dataset, or text that a model writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from marlinq.calibration import Chat, check_tokens, read_passages, render_chat
from marlinq.calibration.images import holds_images
from marlinq.core import boundaries
from marlinq.core.errors import UsageError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.runtime import LoadedModel
from marlinq.runtime.writing import TextWriter

_SPLIT = "test"


@dataclass(frozen=True)
class EvaluationText:
    """Token windows that don't overlap, and the source of their text."""

    source: str
    windows: tuple[tuple[int, ...], ...]


def read_windows(
    source: str, tokenizer: Any, *, windows: int, length: int, vocabulary: int
) -> EvaluationText:
    """The first ``windows`` windows of ``length`` tokens of a text.

    Where the tokenizer puts a start token before every text, each window begins with it; it counts as one of
    the ``length`` tokens.

    Args:
        source: file or dataset, as :mod:`marlinq.calibration.sources` describes; a dataset's split is
            ``test`` unless ``source`` names another. Rows of text are joined by blank lines.
        tokenizer: the model's tokenizer.
        windows: largest number of windows; there are fewer when the text ends.
        length: tokens per window.
        vocabulary: number of token ids that the model knows.

    Raises:
        UsageError: the source can't be read, does not fill one window, or holds images.
        EnvironmentProblem: the source is on the Hub, which can't be reached.
        UnsupportedError: the source holds chats, and the tokenizer has no chat template.
        CheckpointError: a token id is beyond the vocabulary, or the chat template fails.
    """
    begin = _begin_tokens(tokenizer)
    step = length - len(begin)
    if step < 1:
        raise UsageError(f"length: expected more than {len(begin)}, found {length}")
    ids: list[int] = []
    for number, row in enumerate(read_passages(source, split=_SPLIT), 1):
        if isinstance(row, list):
            tokens = row
        else:
            if isinstance(row, Chat) and holds_images(row):
                raise UsageError(
                    f"text {source}: row {number} holds images; leave such rows out, only text is evaluated"
                )
            text = render_chat(row, tokenizer, source) if isinstance(row, Chat) else row
            with boundaries.tokenizer(tokenizer):
                tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        check_tokens(tokens, vocabulary, source)
        ids += tokens
        if len(ids) >= windows * step:
            break
    count = min(windows, len(ids) // step)
    if count == 0:
        raise UsageError(
            f"text {source}: {len(ids)} tokens, fewer than one window of {step}; lower --length or add text"
        )
    cut = tuple((*begin, *ids[start * step : (start + 1) * step]) for start in range(count))
    return EvaluationText(source, cut)


def write_windows(
    loaded: LoadedModel,
    *,
    windows: int,
    length: int,
    seed: int,
    progress: ReportProgress = no_progress,
) -> EvaluationText:
    """``windows`` texts of up to ``length`` tokens that the model samples from ``seed``."""
    writer = TextWriter(
        loaded, rows=windows, max_length=length, seed=seed, otherwise="pass --text FILE", progress=progress
    )
    try:
        written = writer.write(tokens=windows * length, documents=windows)
    finally:
        writer.close()
    source = f"sampled from {loaded.path} with seed {seed}"
    return EvaluationText(source, written.documents)


def _begin_tokens(tokenizer: Any) -> tuple[int, ...]:
    with boundaries.tokenizer(tokenizer):
        first = tokenizer("a")["input_ids"][:1]
        return tuple(first) if first == [tokenizer.bos_token_id] else ()
