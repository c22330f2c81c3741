"""Getting the calibration documents of a run, and recognising them when it is resumed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from marlinq.calibration import (
    Document,
    documents_hash,
    generate_documents,
    load_tokenizer,
    read_documents,
)
from marlinq.checkpoint import Checkpoint, CheckpointWriter
from marlinq.core import boundaries
from marlinq.core.errors import EnvironmentProblem, OutputError
from marlinq.core.progress import ReportProgress
from marlinq.models import ModelInstance
from marlinq.operations.quantize.recipe import Recipe

_WRITTEN_TEXT = "calibration.json"


def longest(config: Any, recipe: Recipe) -> int:
    """Tokens that a document may have: the recipe's, but no more than the model has positions."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(positions, int) or not 0 < positions < recipe.max_length:
        return recipe.max_length
    warnings.warn(
        f"calibration: max_length {recipe.max_length} is cut to the model's {positions} positions",
        stacklevel=3,
    )
    return int(positions)


def text_from_outside(
    checkpoint: Checkpoint, config: Any, recipe: Recipe, *, max_length: int, trust_remote_code: bool
) -> list[Document]:
    """The documents of a file or dataset."""
    return read_documents(
        recipe.calibration,
        tokenizer=lambda: load_tokenizer(checkpoint.path, trust_remote_code=trust_remote_code),
        samples=recipe.samples,
        max_length=max_length,
        seed=recipe.seed,
        vocabulary=config.get_text_config().vocab_size,
    )


def note_text(writer: CheckpointWriter, recipe: Recipe, documents: Sequence[Document]) -> None:
    """Notes the identity of the text in the writer's journal.

    Raises:
        OutputError: the run is resumed, and the interrupted one had other text.
    """
    identity = {
        "source": recipe.calibration,
        "documents": len(documents),
        "tokens": sum(map(len, documents)),
        "sha256": documents_hash(documents),
    }
    noted = writer.notes.get("calibration")
    if noted is None:
        writer.commit({"calibration": identity})
    elif noted != identity:
        raise OutputError(
            f"{writer.partial}: the interrupted run calibrated on {noted['tokens']} tokens, "
            f"{noted['source']} now gives {identity['tokens']}; restore it, or remove the folder"
        )


def text_by_the_model(
    instance: ModelInstance,
    writer: CheckpointWriter,
    recipe: Recipe,
    *,
    max_length: int,
    progress: ReportProgress,
) -> list[Document]:
    """The documents that the model writes, or wrote in the interrupted run that this one resumes."""
    kept = writer.read_json(_WRITTEN_TEXT)
    if kept is not None:
        try:
            return [Document(tuple(map(int, tokens))) for tokens in kept]
        except (TypeError, ValueError):
            raise OutputError(
                f"{writer.partial / _WRITTEN_TEXT}: is damaged; remove {writer.partial} and start over"
            ) from None
    model = instance.whole_model()
    try:
        with boundaries.forward(instance.source):
            documents = generate_documents(
                model,
                instance.blueprint.config,
                samples=recipe.samples,
                max_length=max_length,
                seed=recipe.seed,
                device=instance.device,
                progress=progress,
            )
    finally:
        instance.release("")
    # Sampling takes minutes, and on a GPU nothing promises the same text again.
    writer.write_json(_WRITTEN_TEXT, [document.tokens for document in documents])
    return documents


def forget_written_text(writer: CheckpointWriter) -> None:
    """Removes what only a resumed run would need from the unfinished folder."""
    writer.remove(_WRITTEN_TEXT)


def check_room(instance: ModelInstance) -> None:
    """Makes sure that the whole model fits on the device, so that it can write text.

    Raises:
        EnvironmentProblem: it does not.
    """
    model = instance.model
    needed = sum(parameter.numel() for parameter in model.parameters()) * instance.dtype.itemsize
    if instance.device.type == "cuda":
        free = torch.cuda.mem_get_info(instance.device)[0]
    else:
        free = psutil.virtual_memory().available
    # A fifth on top for the key-value cache and activations.
    if needed * 1.2 > free:
        raise EnvironmentProblem(
            f"calibration 'self': to write text the whole model has to fit on {instance.device}: needs "
            f"{needed * 1.2 / 1e9:.1f} GB, {free / 1e9:.1f} GB are free; pass --calibration FILE, "
            "which runs one block at a time"
        )
