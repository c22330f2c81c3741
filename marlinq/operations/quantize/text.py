"""Gathers the calibration documents of a run, and recognises them when the run is resumed."""

from __future__ import annotations

import gc
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from marlinq.calibration import (
    MIN_TOKENS,
    Document,
    Duplicates,
    Part,
    documents_hash,
    load_tokenizer,
    read_documents,
    read_part,
    shares,
)
from marlinq.checkpoint import Checkpoint, CheckpointWriter, ReadAhead
from marlinq.core.dtypes import torch_dtype
from marlinq.core.errors import EnvironmentProblem, OutputError, UsageError
from marlinq.core.files import read_regular
from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.core.settings import AUTO
from marlinq.methods import METHODS
from marlinq.models import Blueprint, ModelInstance, TensorNames
from marlinq.operations.quantize.budget import SAMPLES, TextBudget, Work, enough, text_budget, writing_dtype
from marlinq.operations.quantize.pace import Pace
from marlinq.operations.quantize.recipe import NO_TEMPLATE, Recipe
from marlinq.runtime import LoadedModel
from marlinq.runtime.loading import read_generation_config
from marlinq.runtime.writing import TOP_K, TextWriter

SELF = "self"
"""Value of ``calibration`` for text that the model writes itself."""
DRAWN_ANEW = "documents drawn anew"
"""Name in reports for documents in which the model has replaced some tokens by its own draws."""
OWN_TEMPLATE = "model"

_WRITTEN_TEXT = "calibration.json"
_DRAWN_TEXT = "drawn.json"
_MOST_TEMPLATE_BYTES = 1_000_000
_AHEAD_BYTES = 512 << 20


@dataclass
class CalibrationText:
    """The documents of a run and their sources.

    Attributes:
        documents: documents to calibrate on, from all sources that have been read, in order.
        tuned: documents that the model wrote for tuning only.
        sources: name, number of documents and number of tokens of each source.
        duplicates: digests of the documents so far, to leave out repeated ones.
    """

    documents: list[Document] = field(default_factory=list)
    tuned: list[Document] = field(default_factory=list)
    sources: list[dict[str, Any]] = field(default_factory=list)
    duplicates: Duplicates = field(default_factory=Duplicates)

    def add(self, source: str, documents: Sequence[Document]) -> None:
        """Adds the documents of ``source``."""
        self.documents += documents
        self.sources.append(
            {"source": source, "documents": len(documents), "tokens": sum(map(len, documents))}
        )


def parts_of(recipe: Recipe) -> tuple[Part, ...]:
    """The recipe's sources with their weights.

    Raises:
        UsageError: a weight is 0, or a source is named twice.
    """
    spellings = recipe.calibration if isinstance(recipe.calibration, tuple) else (recipe.calibration,)
    parts = tuple(map(read_part, spellings))
    names = [part.source for part in parts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"calibration: {twice[0]!r} is named twice; give it one weight")
    return parts


@dataclass(frozen=True)
class SourcePart:
    """One source of calibration text and its share of the amount.

    Attributes:
        source: source as the recipe spells it.
        recipe: recipe with ``samples`` and ``tokens`` of this source's share.
        most: tokens that are enough for the method where the recipe's ``tokens`` is ``auto``; None for no
            limit.
    """

    source: str
    recipe: Recipe
    most: int | None

    @property
    def samples(self) -> int | None:
        """Number of documents from a file or dataset; None for as many as the tokens take."""
        if isinstance(self.recipe.samples, int):
            return self.recipe.samples
        return SAMPLES if self.recipe.tokens == AUTO else None

    @property
    def tokens(self) -> int | None:
        """Largest number of tokens from a file or dataset; None for no limit."""
        return self.recipe.tokens if isinstance(self.recipe.tokens, int) else self.most


def tokens_looked_at(recipe: Recipe) -> int | None:
    """Number of tokens that are enough for the method, where ``recipe`` gives no number; None for no limit.

    There is no limit with tuning, which learns from every token.
    """
    if recipe.tokens != AUTO or recipe.tune_steps:
        return None
    return METHODS[recipe.method].enough_tokens


def recipes_of_parts(recipe: Recipe) -> list[SourcePart]:
    """The recipe's sources, each with a share of samples and tokens in proportion to its weight.

    Raises:
        UsageError: a share is too small for a document.
    """
    parts = parts_of(recipe)
    most = tokens_looked_at(recipe)
    if len(parts) == 1:
        return [SourcePart(parts[0].source, recipe, most)]
    weights = [part.weight for part in parts]
    bounds = [None] * len(parts) if most is None else shares(most, weights)
    changes: list[dict[str, Any]] = [{} for _ in parts]
    if isinstance(recipe.tokens, int):
        for change, share in zip(changes, shares(recipe.tokens, weights), strict=True):
            change["tokens"] = share
    if isinstance(recipe.samples, int) or recipe.tokens == AUTO:
        samples = recipe.samples if isinstance(recipe.samples, int) else SAMPLES
        for change, share in zip(changes, shares(samples, weights), strict=True):
            change["samples"] = share
    for part, change in zip(parts, changes, strict=True):
        if change.get("samples") == 0 or change.get("tokens", _SMALLEST_SHARE) < _SMALLEST_SHARE:
            raise UsageError(
                f"calibration {part.source!r}: its weight leaves it no document; raise it, --samples or "
                "--tokens"
            )
    return [
        SourcePart(part.source, recipe.replace(**change), bound)
        for part, change, bound in zip(parts, changes, bounds, strict=True)
    ]


_SMALLEST_SHARE = 16
"""tokens of a source at least"""
_CALIBRATED = 3 << 17
"""tokens to calibrate on, at most, of the text that the model writes for tuning; more hardly change a
Hessian"""
_CALIBRATED_WITH = 80_000
"""tokens to calibrate on, at most, of a file or dataset together with text that the model writes or draws
anew for tuning; on SmolLM2 three times as many were worse"""


@dataclass(frozen=True)
class PlannedText:
    """Text to take from one source.

    Attributes:
        source: source as the recipe spells it.
        tokens: tokens to calibrate on, at most.
        budget: amount that the model writes, with text for tuning; None for files and datasets.
        counted: whether ``tokens`` is the exact number and not a limit.
    """

    source: str
    tokens: int
    budget: TextBudget | None = None
    counted: bool = False


def tuning_part(recipe: Recipe) -> SourcePart | None:
    """Text that the model writes for tuning where the calibration text is a file or dataset; None for
    none."""
    if not (recipe.tune_steps and recipe.tune_own_text):
        return None
    if any(part.source == SELF for part in parts_of(recipe)):
        return None
    return SourcePart(SELF, recipe.replace(calibration=SELF, samples=AUTO, tokens=AUTO), None)


def writes_text(recipe: Recipe) -> bool:
    """Whether the model writes any of the text itself."""
    return tuning_part(recipe) is not None or any(part.source == SELF for part in parts_of(recipe))


def tokens_drawn_anew(recipe: Recipe, tokens: int) -> int:
    """Tokens that the model draws anew to calibrate on, beside ``tokens`` from files and datasets.

    0 unless the model is tuned and writes no text itself.
    """
    if not recipe.tune_steps or writes_text(recipe) or not METHODS[recipe.method].calibrated:
        return 0
    return _calibrated_beside(tokens)


def planned_tuning_text(
    recipe: Recipe, checkpoint: Checkpoint, blueprint: Blueprint, device: torch.device
) -> PlannedText | None:
    """Amount of text that the model writes for tuning, where :func:`tuning_part` has any."""
    part = tuning_part(recipe)
    if part is None:
        return None
    dtype = writing_dtype(device, stored_dtype(checkpoint, blueprint))
    budget = text_budget(part.recipe, Work.of(blueprint), device, dtype)
    return PlannedText(part.source, budget.tokens, budget)


def planned_text(
    recipe: Recipe,
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    device: torch.device,
    counted: Mapping[str, int] | None = None,
) -> list[PlannedText]:
    """Text to calibrate on from each source of ``recipe``.

    Args:
        recipe: settings of the run.
        checkpoint, blueprint: the model.
        device: device that the model writes text on.
        counted: source -> its number of tokens, for sources that have been counted.
    """
    work = Work.of(blueprint)
    found = []
    longest = work.longest(recipe)
    for part in recipes_of_parts(recipe):
        if part.source == SELF:
            dtype = writing_dtype(device, stored_dtype(checkpoint, blueprint))
            budget = text_budget(part.recipe, work, device, dtype, most=part.most)
            found.append(PlannedText(part.source, min(budget.tokens, _calibrated(recipe)), budget))
            continue
        if counted is not None and part.source in counted:
            found.append(PlannedText(part.source, counted[part.source], counted=True))
            continue
        bounds = [part.tokens, None if part.samples is None else part.samples * longest]
        tokens = min(bound for bound in bounds if bound is not None)
        found.append(PlannedText(part.source, tokens))
    own = planned_tuning_text(recipe, checkpoint, blueprint, device)
    beside = _calibrated_beside(sum(text.tokens for text in found))
    if own is not None and beside:
        found.append(replace(own, tokens=min(own.tokens, beside)))
    if anew := tokens_drawn_anew(recipe, sum(text.tokens for text in found)):
        found.append(PlannedText(DRAWN_ANEW, anew))
    return found


def longest(config: Any, recipe: Recipe) -> int:
    """Tokens that a document is cut to: the recipe's ``max_length``, at most the model's positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or not 0 < positions < recipe.max_length:
        return recipe.max_length
    warnings.warn(
        f"calibration: max_length {recipe.max_length} is cut to the model's {positions} positions",
        stacklevel=3,
    )
    return int(positions)


def own_tokenizer(folder: Path, recipe: Recipe, *, trust_remote_code: bool) -> Any:
    """The model's tokenizer, with the chat template from the recipe's file where it names one.

    Raises:
        CheckpointError: the model has no tokenizer, or it can't be read.
        UsageError: the template's file can't be read.
    """
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    template = read_template(recipe)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def read_template(recipe: Recipe) -> str | None:
    """The text of the recipe's template file; None where it names no file.

    Raises:
        UsageError: the file can't be read.
    """
    if recipe.chat_template in (NO_TEMPLATE, OWN_TEMPLATE):
        return None
    path = Path(recipe.chat_template)
    try:
        return read_regular(path, _MOST_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--chat-template {path}: can't be read ({error}); expected {NO_TEMPLATE}, {OWN_TEMPLATE} or a "
            "file with a Jinja template"
        ) from None


def text_from_outside(
    part: SourcePart,
    folder: Path,
    config: Any,
    *,
    max_length: int,
    duplicates: Duplicates,
    trust_remote_code: bool,
) -> list[Document]:
    """The documents of a file or dataset.

    Args:
        part: the source and its share of the amount.
        folder: path of the checkpoint, for the tokenizer.
        config: config of the model.
        max_length: tokens that a document is cut to.
        duplicates: digests of the documents of all sources so far.
        trust_remote_code: run code that the tokenizer brings.
    """
    recipe = part.recipe
    return read_documents(
        part.source,
        tokenizer=lambda: own_tokenizer(folder, recipe, trust_remote_code=trust_remote_code),
        samples=part.samples,
        tokens=part.tokens,
        max_length=max_length,
        seed=recipe.seed,
        vocabulary=config.get_text_config().vocab_size,
        as_messages=recipe.chat_template != NO_TEMPLATE,
        duplicates=duplicates,
    )


class TextGatherer:
    """The calibration documents of a run, source by source.

    Args:
        checkpoint, blueprint: the model.
        recipe: settings of the run.
        device: device that the model writes text on.
        max_length: tokens that a document is cut to.
        trust_remote_code: run code that model or tokenizer bring.
        progress, message: callbacks of the run.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        blueprint: Blueprint,
        recipe: Recipe,
        device: torch.device,
        *,
        max_length: int,
        trust_remote_code: bool,
        progress: ReportProgress,
        message: ReportMessage,
    ) -> None:
        self._checkpoint = checkpoint
        self._blueprint = blueprint
        self._recipe = recipe
        self._device = device
        self._max_length = max_length
        self._trust_remote_code = trust_remote_code
        self._progress = progress
        self._message = message
        self._text = CalibrationText()
        self._own: SourcePart | None = None
        self._to_tune = tuning_part(recipe)

    def prepare(self, *, resume: bool) -> None:
        """Reads files and datasets, so that their errors come before the output folder is created, and checks
        that the model has room to write text.

        Args:
            resume: whether the run is resumed; its text is then probably written, so room is not checked.
        """
        read_template(self._recipe)
        for part in recipes_of_parts(self._recipe):
            if part.source == SELF:
                self._own = part
                continue
            found = text_from_outside(
                part,
                self._checkpoint.path,
                self._blueprint.config,
                max_length=self._max_length,
                duplicates=self._text.duplicates,
                trust_remote_code=self._trust_remote_code,
            )
            self._text.add(part.source, found)
            if part.most is not None and sum(map(len, found)) > part.most - MIN_TOKENS:
                self._message(
                    f"{part.source}: {part.most} tokens are used, {enough(self._recipe)}; "
                    "--tokens N for another amount"
                )
        written = self._own or self._to_tune
        if written is not None and not resume:
            check_room(self._checkpoint, self._blueprint, written, self._device, to_tune=self._own is None)

    def gather(self, writer: CheckpointWriter) -> CalibrationText:
        """All text of the run. The model writes its part last, unless the interrupted run has stored it."""
        part = self._own or self._to_tune
        if part is None:
            return self._text
        written = kept_text(writer)
        if written is None:
            written = text_by_the_model(
                self._checkpoint,
                self._blueprint,
                part.recipe,
                self._device,
                trust_remote_code=self._trust_remote_code,
                progress=self._progress,
                message=self._message,
                most=part.most,
                to_tune=self._own is None,
            )
            keep_text(writer, written)
        duplicates = self._text.duplicates
        new = [found for found in written if duplicates.is_new(None, found.tokens)]
        if self._own is not None:
            calibrated = _first(new, _calibrated(self._recipe))
        elif METHODS[self._recipe.method].calibrated:
            calibrated = _first(new, _calibrated_beside(sum(map(len, self._text.documents))))
        else:
            calibrated = 0
        if calibrated:
            self._text.add(SELF, new[:calibrated])
        self._text.tuned = new[calibrated:]
        return self._text


def _calibrated(recipe: Recipe) -> int:
    """Tokens to calibrate on, at most, of the text that the model writes."""
    asked = recipe.samples != AUTO or recipe.tokens != AUTO
    return sys.maxsize if asked or not recipe.tune_steps else _CALIBRATED


def _calibrated_beside(tokens: int) -> int:
    """Tokens to calibrate on, at most, of text that the model writes or draws anew for tuning, beside
    ``tokens`` from files and datasets. They are added because codes overfit a few documents."""
    return max(0, _CALIBRATED_WITH - tokens)


def _first(documents: Sequence[Document], tokens: int) -> int:
    """Number of documents from the front that together have at least ``tokens`` tokens."""
    if not tokens:
        return 0
    for count, total in enumerate(itertools.accumulate(map(len, documents)), 1):
        if total >= tokens:
            return count
    return len(documents)


def add_drawn_anew(
    writer: CheckpointWriter,
    text: CalibrationText,
    recipe: Recipe,
    draw: Callable[[int], list[Document]],
) -> None:
    """Adds documents that the model draws anew to a short calibration text.

    Args:
        writer: writer of the run, with the documents that an interrupted run has drawn.
        text: all other text of the run.
        recipe: settings of the run.
        draw: function from a number of tokens to documents with about as many.
    """
    tokens = tokens_drawn_anew(recipe, sum(map(len, text.documents)))
    if not tokens:
        return
    drawn = kept_text(writer, _DRAWN_TEXT)
    if drawn is None:
        drawn = draw(tokens)
        keep_text(writer, drawn, _DRAWN_TEXT)
    text.add(DRAWN_ANEW, drawn)


def note_text(writer: CheckpointWriter, recipe: Recipe, text: CalibrationText) -> None:
    """Notes the identity of the text in the writer's journal.

    Raises:
        OutputError: the run is resumed, and the interrupted run had other text.
    """
    names = [part.source for part in parts_of(recipe)]
    beside = [each["source"] for each in text.sources if each["source"] not in names]
    identity = {
        "source": ", ".join(names + beside),
        "documents": len(text.documents),
        "tokens": sum(map(len, text.documents)),
        "sha256": documents_hash(text.documents),
    }
    if len(text.sources) > 1:
        identity["sources"] = text.sources
    if text.tuned:
        identity["tuned"] = {
            "source": SELF,
            "documents": len(text.tuned),
            "tokens": sum(map(len, text.tuned)),
            "sha256": documents_hash(text.tuned),
        }
    if text.duplicates.found:
        identity["duplicates"] = text.duplicates.found
    noted = writer.notes.get("calibration")
    if noted is None:
        writer.commit({"calibration": identity})
    elif noted != identity:
        raise OutputError(
            f"{writer.partial}: the interrupted run calibrated on {noted['tokens']} tokens, "
            f"{noted['source']} now gives {identity['tokens']}; restore it, or remove the folder"
        )


def kept_text(writer: CheckpointWriter, name: str = _WRITTEN_TEXT) -> list[Document] | None:
    """The text that the model wrote in the interrupted run, or None.

    Raises:
        OutputError: its file is damaged.
    """
    kept = writer.kept_json(name)
    if kept is None:
        return None
    try:
        return [Document(tuple(map(int, tokens))) for tokens in kept]
    except (TypeError, ValueError):
        raise OutputError(
            f"{writer.partial / name}: is damaged; remove {writer.partial} and start over"
        ) from None


def keep_text(writer: CheckpointWriter, documents: Sequence[Document], name: str = _WRITTEN_TEXT) -> None:
    """Stores the text that the model wrote for a run that resumes this one: writing takes long, and a GPU may
    not give the same text again."""
    writer.keep_json(name, [document.tokens for document in documents])


def forget_written_text(writer: CheckpointWriter) -> None:
    """Removes the stored texts, which only a resumed run needs, from the unfinished folder."""
    writer.remove(_WRITTEN_TEXT)
    writer.remove(_DRAWN_TEXT)


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
    message(
        f"wrote {len(written.documents)} documents, {sum(map(len, written.documents))} tokens in "
        f"{written.seconds:.0f} s; {written.how}"
    )
    return [Document(tokens) for tokens in written.documents]


def announcement(budget: TextBudget, seconds: float, *, to_tune: bool = False) -> str:
    """The line that announces text that the model writes in about ``seconds``."""
    if to_tune:
        why = "the model also writes text to be tuned on"
        otherwise = "--no-tune-own-text to leave it out"
    else:
        why = "no calibration text was given, so the model writes it"
        otherwise = "--tokens N for another amount"
    return (
        f"{why}: {budget.tokens} tokens ({budget.reason}), {budget.rows} documents at once of up to "
        f"{budget.max_length} tokens; about {max(seconds, 1):.0f} s; {otherwise}"
    )


def stored_dtype(checkpoint: Checkpoint, blueprint: Blueprint) -> torch.dtype:
    """dtype of the first linear's stored weight."""
    names = TensorNames(blueprint, checkpoint.tensors, source=str(checkpoint.path))
    first = next(blueprint.projections())
    stored, _ = names.places(first.parameter, blueprint.parameters.get(first.parameter, ()))[0]
    return torch_dtype(checkpoint.tensors[stored].dtype)


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
