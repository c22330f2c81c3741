"""Gathers the calibration documents of a run, and recognises them when the run is resumed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from marlinq.calibration import MIN_TOKENS, Document, Duplicates, documents_hash, read_documents
from marlinq.checkpoint import Checkpoint, CheckpointWriter
from marlinq.core.errors import OutputError, UnsupportedError
from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.methods import METHODS
from marlinq.models import Blueprint
from marlinq.operations.quantize.budget import enough
from marlinq.operations.quantize.chat_template import (
    own_processor,
    own_tokenizer,
    read_template,
    template_file,
)
from marlinq.operations.quantize.own_text import check_room, text_by_the_model
from marlinq.operations.quantize.planned_text import (
    DRAWN_ANEW,
    SELF,
    SourcePart,
    calibrated_beside,
    calibrated_of_own,
    longest,
    parts_of,
    recipes_of_parts,
    tokens_drawn_anew,
    tuning_part,
)
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.recipe_settings import NO_TEMPLATE
from marlinq.operations.quantize.spelling import spelled

_WRITTEN_TEXT = "calibration.json"
_DRAWN_TEXT = "drawn.json"
_SOURCES = "sources.json"


@dataclass
class CalibrationText:
    """The documents of a run and their sources.

    Attributes:
        documents: documents to calibrate on, from all sources that have been read, in order.
        tuned: documents that the model wrote for tuning only.
        own_left_out: whether text of the model's own was left out, which it was to be tuned on too.
        sources: name, number of documents, number of tokens and hash of each source.
        duplicates: digests of the documents so far, to leave out repeated ones.
    """

    documents: list[Document] = field(default_factory=list)
    tuned: list[Document] = field(default_factory=list)
    own_left_out: bool = False
    sources: list[dict[str, Any]] = field(default_factory=list)
    duplicates: Duplicates = field(default_factory=Duplicates)

    def add(self, source: str, documents: Sequence[Document]) -> None:
        """Adds the documents of ``source``."""
        self.documents += documents
        counts = {"documents": len(documents), "tokens": sum(map(len, documents))}
        self.sources.append({"source": source, **counts, "sha256": documents_hash(documents)})


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
        template=template_file(recipe),
        duplicates=duplicates,
        processor=lambda: own_processor(folder, trust_remote_code=trust_remote_code),
    )


def outside_sources(
    checkpoint: Checkpoint, blueprint: Blueprint, recipe: Recipe, *, trust_remote_code: bool
) -> list[dict[str, Any]]:
    """Name, numbers and hash of each file and dataset of a recipe, as they are now.

    Raises:
        MarlinqError: one can't be read.
    """
    text = CalibrationText()
    with warnings.catch_warnings(action="ignore"):
        max_length = longest(blueprint.config, recipe)
        for part in recipes_of_parts(recipe):
            if part.source != SELF:
                documents = text_from_outside(
                    part,
                    checkpoint.path,
                    blueprint.config,
                    max_length=max_length,
                    duplicates=text.duplicates,
                    trust_remote_code=trust_remote_code,
                )
                text.add(part.source, documents)
    return text.sources


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
        self._room_checked = False
        self._template: str | None = None

    def prepare(self, *, resume: bool) -> None:
        """Reads files and datasets, so that their errors come before the output folder is created, and checks
        that the model has room to write text.

        Args:
            resume: whether the run is resumed; its text is then probably written, so room is checked only if
                it turns out to be missing.
        """
        self._template = read_template(self._recipe)
        for part in recipes_of_parts(self._recipe):
            if part.source == SELF:
                self._own = part
                continue
            outside = text_from_outside(
                part,
                self._checkpoint.path,
                self._blueprint.config,
                max_length=self._max_length,
                duplicates=self._text.duplicates,
                trust_remote_code=self._trust_remote_code,
            )
            self._text.add(part.source, outside)
            if part.most is not None and sum(map(len, outside)) > part.most - MIN_TOKENS:
                self._message(
                    f"{part.source}: {part.most} tokens are used, {enough(self._recipe)}; "
                    "--tokens N for another amount"
                )
        written = self._own or self._to_tune
        if written is not None and not self._blueprint.predicts_tokens:
            raise UnsupportedError(
                f"{self._checkpoint.path}: {self._blueprint.architecture} has no output head, so it "
                "writes no text; pass --calibration FILE"
            )
        if written is not None and not resume:
            self._check_room(written)

    def gather(self, writer: CheckpointWriter) -> CalibrationText:
        """All text of the run. The model writes its part last, unless the interrupted run has stored it.

        Raises:
            EnvironmentProblem: the model has no room to write its part.
            OutputError: the run is resumed, and the interrupted run had other text.
        """
        self._check_sources(writer)
        part = self._own or self._to_tune
        if part is None:
            return self._text
        written = kept_text(writer)
        if written is None:
            if not self._room_checked:
                self._check_room(part)
            written = text_by_the_model(
                self._checkpoint,
                self._blueprint,
                part.recipe,
                self._device,
                trust_remote_code=self._trust_remote_code,
                progress=self._progress,
                message=self._message,
                most=part.most,
                beside=None if self._own is not None else self._text.documents,
            )
            self.keep_sources(writer)
            keep_text(writer, written)
        self._text.own_left_out = self._own is None and not written
        duplicates = self._text.duplicates
        new = [document for document in written if duplicates.is_new(None, document.tokens)]
        if self._own is not None:
            calibrated = _first(new, calibrated_of_own(self._recipe))
        elif METHODS[self._recipe.method].calibrated:
            calibrated = _first(new, calibrated_beside(sum(map(len, self._text.documents))))
        else:
            calibrated = 0
        if calibrated:
            self._text.add(SELF, new[:calibrated])
        self._text.tuned = new[calibrated:]
        return self._text

    def keep_sources(self, writer: CheckpointWriter) -> None:
        """Stores what files and datasets give, for a run that resumes this one; to be called before anything
        is stored that depends on it.

        Raises:
            OutputError: the run is resumed, and the interrupted run had other text.
        """
        self._check_sources(writer)
        writer.keep_json(_SOURCES, self._from_outside())

    def _check_sources(self, writer: CheckpointWriter) -> None:
        kept = writer.kept_json(_SOURCES)
        if kept is None:
            return
        changed = [
            each["source"] for each in self._from_outside() if not isinstance(kept, list) or each not in kept
        ]
        if changed:
            raise OutputError(
                f"{writer.partial}: {', '.join(changed)} gives other text than the interrupted run had; "
                "restore it, or remove the folder"
            )

    def _from_outside(self) -> list[dict[str, Any]]:
        """Names and hashes of files and datasets that have been read, and of the template's file."""
        names = {part.source for part in parts_of(self._recipe)} - {SELF}
        sources = [each for each in self._text.sources if each["source"] in names]
        if self._template is not None:
            named = f"{spelled('chat_template')} {self._recipe.chat_template}"
            sources.append({"source": named, "sha256": sha256(self._template.encode()).hexdigest()})
        return sources

    def _check_room(self, part: SourcePart) -> None:
        check_room(self._checkpoint, self._blueprint, part, self._device, to_tune=self._own is None)
        self._room_checked = True


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
    before_keeping: Callable[[], None],
) -> None:
    """Adds documents that the model draws anew to a short calibration text.

    Args:
        writer: writer of the run, with the documents that an interrupted run has drawn.
        text: all other text of the run.
        recipe: settings of the run.
        draw: function from a number of tokens to documents with about as many.
        before_keeping: called before the drawn documents are stored.
    """
    tokens = tokens_drawn_anew(recipe, sum(map(len, text.documents)))
    if not tokens:
        return
    drawn = kept_text(writer, _DRAWN_TEXT)
    if drawn is None:
        drawn = draw(tokens)
        before_keeping()
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
    if text.own_left_out:
        identity["own_left_out"] = True
    if text.duplicates.found:
        identity["duplicates"] = text.duplicates.found
    noted = writer.notes.get("calibration")
    if noted is None:
        writer.commit({"calibration": identity})
    elif noted != identity:
        raise OutputError(
            f"{writer.partial}: {noted['source']} gives other text than the interrupted run had "
            f"({noted['tokens']} tokens then, {identity['tokens']} now); restore it, or remove the folder"
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
        return [Document(_token_ids(tokens)) for tokens in kept]
    except (TypeError, ValueError):
        raise OutputError(
            f"{writer.partial / name}: is damaged; remove {writer.partial} and start over"
        ) from None


def _token_ids(values: Any) -> tuple[int, ...]:
    if not (isinstance(values, list) and values and all(type(each) is int and each >= 0 for each in values)):
        raise ValueError
    return tuple(values)


def keep_text(writer: CheckpointWriter, documents: Sequence[Document], name: str = _WRITTEN_TEXT) -> None:
    """Stores the text that the model wrote for a run that resumes this one: writing takes long, and a GPU may
    not give the same text again."""
    writer.keep_json(name, [document.tokens for document in documents])


def forget_written_text(writer: CheckpointWriter) -> None:
    """Removes the stored texts, which only a resumed run needs, from the unfinished folder."""
    writer.remove(_WRITTEN_TEXT)
    writer.remove(_DRAWN_TEXT)
    writer.remove(_SOURCES)
