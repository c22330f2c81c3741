"""Runs the original model on the tuning text once, a decoder block at a time, for its last hidden states and
for tokens drawn anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from marlinq.calibration import Batch, HiddenStates
from marlinq.core.errors import NumericsError
from marlinq.models import BlockReplay, ModelInstance
from marlinq.operations.quantize.budget import logits_at_once
from marlinq.operations.quantize.tuning.text_rows import REDRAWN, redraw


@dataclass(frozen=True, eq=False)
class Lesson:
    """The text and the original's hidden states.

    Attributes:
        batches: the text.
        first: inputs of the first block; the same for the quantised model, whose embeddings are the
            original's.
        last: outputs of the original's last block.
        device: device that hidden states are loaded to.
    """

    batches: Sequence[Batch]
    first: HiddenStates
    last: HiddenStates
    device: torch.device


def learn(
    instance: ModelInstance,
    replay: BlockReplay,
    batches: Sequence[Batch],
    *,
    folder: Path,
    progress: Callable[[int, int], None],
    device_bytes: int = 0,
) -> Lesson:
    """Runs the original's blocks over ``batches``.

    Args:
        instance: the loaded original, without any weights in memory before and after the call.
        replay: replay of the instance; it records the batches.
        batches: the text.
        folder: folder for hidden states that don't fit host memory.
        progress: called with (blocks done, blocks in all).
        device_bytes: bytes up to which the first block's inputs, and the last block's outputs, stay on the
            device, which is much faster than host memory.

    Raises:
        NumericsError: the original's hidden states hold NaN or infinity.
    """
    first: HiddenStates | None = None
    for number, hidden in enumerate(replay.record(batch.ids for batch in batches)):
        first = first or _states(batches, hidden, folder, device_bytes)
        first.store(number, hidden)
    if first is None:
        raise ValueError("tuning needs at least one batch")
    last = _states(batches, hidden, folder, device_bytes)
    blocks = instance.blueprint.blocks
    with instance.reading_ahead(range(len(blocks))):
        for index, block in enumerate(blocks):
            instance.block(index)
            finite = []
            for number in range(len(batches)):
                hidden = replay.run(index, number, (last if index else first).load(number))
                finite.append(torch.isfinite(hidden).all())
                last.store(number, hidden)
            if not bool(torch.stack(finite).all()):
                raise NumericsError(
                    f"{block.name}: its output holds NaN or infinity in the original model; check the source "
                    "checkpoint, or pass --tune-steps 0"
                )
            instance.release_block(index)
            progress(index + 1, len(blocks))
    return Lesson(batches, first, last, instance.device)


def draw_anew(
    instance: ModelInstance,
    batches: Sequence[Batch],
    *,
    noise: float,
    seed: int,
    folder: Path,
    progress: Callable[[int, int], None],
    device_bytes: int = 0,
) -> list[Batch]:
    """The text with some tokens drawn anew by the original (:func:`~.text_rows.redraw`).

    Args:
        instance, folder, progress, device_bytes: as in :func:`learn`.
        batches: the text, in rows of one length per batch.
        noise: probability that a token is replaced by a random one, as in :func:`~.text_rows.redraw`.
        seed: seed of all draws.
    """
    replay = BlockReplay(instance)
    lesson = learn(instance, replay, batches, folder=folder, progress=progress, device_bytes=device_bytes)
    device = instance.device
    generator = torch.Generator(device).manual_seed(seed)
    drawn = []
    with instance.outer(whole=True):
        head = instance.head_parameters()
        for number, batch in enumerate(batches):
            ids = redraw(
                batch.ids.to(device),
                lesson.last.load(number),
                lambda x: replay.logits(x, head),
                share=REDRAWN,
                noise=noise,
                chunk=logits_at_once(instance.blueprint.config, device),
                generator=generator,
            )
            drawn.append(Batch(ids.cpu(), batch.lengths))
    return drawn


def _states(batches: Sequence[Batch], like: Tensor, folder: Path, device_bytes: int) -> HiddenStates:
    return HiddenStates(
        [(*batch.ids.shape, *like.shape[2:]) for batch in batches],
        dtype=like.dtype,
        device=like.device,
        limit_bytes=psutil.virtual_memory().available // 4,
        folder=folder,
        device_bytes=device_bytes,
    )
