"""Text that the model itself writes: whether it has room for that, and the documents."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Sequence

import psutil
import torch

from marlinq.calibration import MIN_TOKENS, Document
from marlinq.checkpoint import Checkpoint, ReadAhead
from marlinq.core import boundaries
from marlinq.core.display import counted
from marlinq.core.errors import EnvironmentProblem, NumericsError
from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.models import Blueprint, ModelInstance, TensorNames
from marlinq.operations.quantize.budget import TextBudget, Work, text_budget, writing_dtype
from marlinq.operations.quantize.chat_template import check_user_message, own_tokenizer
from marlinq.operations.quantize.pace import Pace
from marlinq.operations.quantize.planned_text import SourcePart, stored_dtype
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.recipe_settings import NO_TEMPLATE
from marlinq.runtime import LoadedModel
from marlinq.runtime.loading import read_generation_config
from marlinq.runtime.writing import STAGE, TOP_K, TextWriter, Written

_AHEAD_BYTES = 512 << 20
_LEAST_ENTROPY = 0.85
"""ratio of the mean entropy of predictions in the model's own text to that in the calibration text, below
which the model is not tuned on text of its own. With web pages it is .6 for Qwen2.5-Coder-0.5B, which writes
code: its divergence is .63 of AutoRound's without text of its own, and .73 with it. It is 1.3 for SmolLM2 and
1.2 for Gemma 3 270M, whose divergence would be 1.3 to 1.4 times as large without. Conversations are not
compared: models are sure of their answers, and the answers are what counts."""
_COMPARED_TOKENS = 4096
"""tokens of each text whose predictions are compared; a shorter calibration text is not compared"""
_COMPARED_LENGTH = 512
"""tokens of a compared document at most, because later tokens are easier to predict"""
_ROWS = 64
"""tokens whose probabilities are in memory at once, beside the logits of a document"""


def text_by_the_model(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    recipe: Recipe,
    device: torch.device,
    *,
    trust_remote_code: bool,
    progress: ReportProgress,
    message: ReportMessage,
    most: int | None = None,
    beside: Sequence[Document] | None = None,
) -> list[Document]:
    """Documents that the model writes; none where it should not be tuned on them.

    The whole model is on the device meanwhile. A few steps are timed first, and ``message`` gets one line
    with the expected time.

    Args:
        checkpoint, blueprint: the model.
        recipe: settings of the run.
        device: device that the model writes on.
        trust_remote_code: run code that model or tokenizer bring.
        progress, message: callbacks of the run.
        most: largest number of tokens; None for no limit.
        beside: documents beside which the model is tuned on the text; None for text to calibrate on. If the
            model is much surer of its own text than of them, the result is empty, because the text is of
            another kind. Conversations are not compared.
    """
    dtype = writing_dtype(device, stored_dtype(checkpoint, blueprint))
    budget = text_budget(recipe, Work.of(blueprint), device, dtype, most=most)
    loaded = _loaded(checkpoint, blueprint, recipe, device, dtype, trust_remote_code)
    otherwise = (
        "take all text from files, with --calibration FILE" if beside is None else "pass --no-tune-own-text"
    )
    writer = TextWriter(
        loaded,
        rows=budget.rows,
        max_length=budget.max_length,
        seed=recipe.seed,
        chat=recipe.chat_template != NO_TEMPLATE,
        otherwise=otherwise,
        # Tuning compares predictions after rare tokens too, so it samples from the whole vocabulary.
        top_k=0 if recipe.tune_steps else TOP_K,
    )

    def unfinished(stage: str, done: int, total: int) -> None:
        # The writer reports the end of each part, often more than once.
        if done < total:
            progress(stage, done, total)

    try:
        seconds = writer.seconds_for(budget.tokens)
        message(announcement(budget, seconds, to_tune=beside is not None))
        compared = beside if recipe.chat_template == NO_TEMPLATE else None
        parts = _write(loaded, writer, budget, seconds, compared, unfinished, message)
        progress(STAGE, budget.tokens, budget.tokens)
    except NumericsError:
        raise NumericsError(
            f"{checkpoint.path}: the model's logits are NaN or infinite while it writes text; check its "
            f"weights, or {otherwise}"
        ) from None
    finally:
        writer.close()
        # Frees the model's memory, which reference cycles may hold, before blocks look at the free memory.
        del writer, loaded
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    documents = [Document(tokens) for part in parts for tokens in part.documents]
    if documents:
        loops = sum(part.loops for part in parts)
        cut = f"; {counted(loops, 'texts')} cut at a loop, some too short to keep" if loops else ""
        message(
            f"wrote {counted(len(documents), 'documents')}, {sum(map(len, documents))} tokens in "
            f"{sum(part.seconds for part in parts):.0f} s{cut}; {parts[0].how}"
        )
        if beside is None and 2 * loops >= len(documents):
            warnings.warn(
                f"{checkpoint.path}: the model often repeats itself, so its own text says little about other "
                f"text; {otherwise}",
                stacklevel=2,
            )
    return documents


def _write(
    loaded: LoadedModel,
    writer: TextWriter,
    budget: TextBudget,
    seconds: float,
    beside: Sequence[Document] | None,
    progress: ReportProgress,
    message: ReportMessage,
) -> list[Written]:
    """The text in one or two parts; no part where it is of another kind than ``beside``.

    Args:
        loaded: the model.
        writer: its writer.
        budget: amount of text.
        seconds: expected seconds for all of it.
        beside: documents to compare the text with; None for no comparison.
        progress, message: callbacks of the run.
    """
    words = [document.tokens for document in beside or () if document.beside is None]
    writer.report_to(Pace(seconds, progress, message))
    if sum(map(len, words)) < _COMPARED_TOKENS:
        return [writer.write(tokens=budget.tokens, documents=budget.documents)]
    # Whole documents: their beginnings alone are harder to predict.
    first = writer.write(tokens=budget.tokens, documents=budget.rows)
    longest = min(_COMPARED_LENGTH, budget.max_length)
    own, given = (mean_entropy(loaded, texts, longest) for texts in (first.documents, words))
    compared = (
        f"entropy of predictions: {own:.2f} nats a token in own text, {given:.2f} in the calibration text; "
        f"own text needs {_LEAST_ENTROPY * given:.2f}"
    )
    if own < _LEAST_ENTROPY * given:
        message(f"{compared}: tuned on the calibration text alone")
        return []
    message(f"{compared}: tuned on both")
    written = sum(map(len, first.documents))
    rest = budget.tokens - written
    if rest < MIN_TOKENS:
        return [first]

    def continued(stage: str, done: int, total: int) -> None:
        progress(stage, written + done, written + total)

    writer.report_to(Pace(seconds * rest / budget.tokens, continued, message))
    return [first, writer.write(tokens=rest)]


def mean_entropy(loaded: LoadedModel, documents: Iterable[tuple[int, ...]], longest: int) -> float:
    """Mean entropy of a model's predictions behind the tokens of a text, in nats.

    Args:
        loaded: the model.
        documents: token ids of each document; those beyond the first 4,096 tokens are not looked at.
        longest: tokens that documents are cut to.
    """
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor([document[:longest]], device=loaded.device)
        with boundaries.forward(loaded.path), torch.no_grad():
            for rows in loaded.model(ids).logits[0].split(_ROWS):
                total += float(torch.special.entr(rows.float().softmax(-1)).sum())
        count += ids.shape[1]
        if count >= _COMPARED_TOKENS:
            break
    return total / count


def announcement(budget: TextBudget, seconds: float, *, to_tune: bool = False) -> str:
    """The line that announces text that the model writes in about ``seconds``."""
    if to_tune:
        why = "the model also writes text to be tuned on"
        otherwise = "--no-tune-own-text to leave it out"
    else:
        why = "the model writes its calibration text"
        otherwise = "--tokens N for another amount"
    return (
        f"{why}: {budget.tokens} tokens ({budget.reason}), {counted(budget.rows, 'documents')} at once of "
        f"up to {counted(budget.max_length, 'tokens')}; about {max(seconds, 1):.0f} s; {otherwise}"
    )


def _loaded(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> LoadedModel:
    tokenizer = None
    if recipe.chat_template != NO_TEMPLATE:
        tokenizer = own_tokenizer(checkpoint.path, recipe, trust_remote_code=trust_remote_code)
        check_user_message(tokenizer, recipe)
    with ReadAhead(checkpoint, device, budget=_AHEAD_BYTES) as reader:
        instance = ModelInstance(blueprint, reader, device=device, dtype=dtype)
        reader.expect(_in_order(blueprint, instance.names))
        instance.whole_model()
    generation_config = read_generation_config(checkpoint)
    if generation_config is not None:
        # Chat models name the tokens that end an answer only in generation_config.json.
        instance.model.generation_config = generation_config
    return LoadedModel(
        path=checkpoint.path,
        model=instance.model,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        decisions={},
        notes=(),
    )


def _in_order(blueprint: Blueprint, names: TensorNames) -> Iterable[str]:
    return (stored for name, shape in blueprint.parameters.items() for stored, _ in names.places(name, shape))


def check_room(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    part: SourcePart,
    device: torch.device,
    *,
    to_tune: bool = False,
) -> None:
    """Checks that the whole model fits the device's free memory, as it must to write text.

    ``to_tune`` says that the text is for tuning and not for calibration; it changes the message only.

    Raises:
        EnvironmentProblem: the model does not fit.
    """
    dtype = writing_dtype(device, stored_dtype(checkpoint, blueprint))
    work = Work.of(blueprint)
    budget = text_budget(part.recipe, work, device, dtype, most=part.most)
    parameters = sum(torch.Size(shape).numel() for shape in blueprint.parameters.values())
    # Activations are taken as a tenth of the weights.
    cache = budget.rows * budget.max_length * work.cache_bytes * dtype.itemsize // 2
    needed = parameters * dtype.itemsize * 1.1 + cache
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    if needed > free:
        asked, otherwise = (
            ("text to be tuned on", "--no-tune-own-text, which tunes on the calibration's alone")
            if to_tune
            else ("calibration 'self'", "--calibration FILE, which runs one block at a time")
        )
        raise EnvironmentProblem(
            f"{asked}: to write text the whole model has to fit on {device}: needs {needed / 1e9:.1f} GB, "
            f"{free / 1e9:.1f} GB are free; pass {otherwise}"
        )
