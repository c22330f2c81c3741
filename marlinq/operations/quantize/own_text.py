"""Text that the model itself writes: whether it has room for that, and the documents."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import psutil
import torch

from marlinq.calibration import Document
from marlinq.checkpoint import Checkpoint, ReadAhead
from marlinq.core.display import counted
from marlinq.core.errors import EnvironmentProblem
from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.models import Blueprint, ModelInstance, TensorNames
from marlinq.operations.quantize.budget import TextBudget, Work, text_budget, writing_dtype
from marlinq.operations.quantize.chat_template import own_tokenizer
from marlinq.operations.quantize.pace import Pace
from marlinq.operations.quantize.planned_text import SourcePart, stored_dtype
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.recipe_settings import NO_TEMPLATE
from marlinq.runtime import LoadedModel
from marlinq.runtime.loading import read_generation_config
from marlinq.runtime.writing import TOP_K, TextWriter

_AHEAD_BYTES = 512 << 20


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
    to_tune: bool = False,
) -> list[Document]:
    """Documents that the model writes.

    The whole model is on the device meanwhile. A few steps are timed first, and ``message`` gets one line
    with the expected time.

    Args:
        checkpoint, blueprint: the model.
        recipe: settings of the run.
        device: device that the model writes on.
        trust_remote_code: run code that model or tokenizer bring.
        progress, message: callbacks of the run.
        most: largest number of tokens; None for no limit.
        to_tune: whether the text is for tuning and not for calibration; changes the message only.
    """
    dtype = writing_dtype(device, stored_dtype(checkpoint, blueprint))
    budget = text_budget(recipe, Work.of(blueprint), device, dtype, most=most)
    loaded = _loaded(checkpoint, blueprint, recipe, device, dtype, trust_remote_code)
    writer = TextWriter(
        loaded,
        rows=budget.rows,
        max_length=budget.max_length,
        seed=recipe.seed,
        chat=recipe.chat_template != NO_TEMPLATE,
        # Tuning compares predictions after rare tokens too, so it samples from the whole vocabulary.
        top_k=0 if recipe.tune_steps else TOP_K,
    )
    try:
        seconds = writer.seconds_for(budget.tokens)
        message(announcement(budget, seconds, to_tune=to_tune))
        writer.report_to(Pace(seconds, progress, message))
        written = writer.write(tokens=budget.tokens, documents=budget.documents)
    finally:
        writer.close()
        # Frees the model's memory, which reference cycles may hold, before blocks look at the free memory.
        del writer, loaded
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    looped = f"; {counted(written.loops, 'documents')} ended in a loop" if written.loops else ""
    message(
        f"wrote {counted(len(written.documents), 'documents')}, {sum(map(len, written.documents))} tokens in "
        f"{written.seconds:.0f} s{looped}; {written.how}"
    )
    return [Document(tokens) for tokens in written.documents]


def announcement(budget: TextBudget, seconds: float, *, to_tune: bool = False) -> str:
    """The line that announces text that the model writes in about ``seconds``."""
    if to_tune:
        why = "the model also writes text to be tuned on"
        otherwise = "--no-tune-own-text to leave it out"
    else:
        why = "the model writes its calibration text"
        otherwise = "--tokens N for another amount"
    return (
        f"{why}: {budget.tokens} tokens ({budget.reason}), {budget.rows} documents at once of up to "
        f"{budget.max_length} tokens; about {max(seconds, 1):.0f} s; {otherwise}"
    )


def _loaded(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> LoadedModel:
    with ReadAhead(checkpoint, device, budget=_AHEAD_BYTES) as reader:
        instance = ModelInstance(blueprint, reader, device=device, dtype=dtype)
        reader.expect(_in_order(blueprint, instance.names))
        instance.whole_model()
    generation_config = read_generation_config(checkpoint)
    if generation_config is not None:
        # Chat models name the tokens that end an answer only in generation_config.json.
        instance.model.generation_config = generation_config
    chat = recipe.chat_template != NO_TEMPLATE
    return LoadedModel(
        path=checkpoint.path,
        model=instance.model,
        tokenizer=own_tokenizer(checkpoint.path, recipe, trust_remote_code=trust_remote_code)
        if chat
        else None,
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
