"""Hidden states of the calibration text that enter the first block, and copies of them for comparison."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from marlinq.calibration import Batch, HiddenStates
from marlinq.core.errors import NumericsError
from marlinq.models import BlockReplay, ModelInstance
from marlinq.operations.quantize.budget import STATES_BYTES, states_on_device


def first_states(
    instance: ModelInstance, replay: BlockReplay, batches: Sequence[Batch], folder: Path
) -> HiddenStates:
    """Hidden states that enter the first block.

    Args:
        instance: the loaded model.
        replay: records the calls of its blocks.
        batches: the text, at least one batch.
        folder: folder for states that don't fit memory.

    Raises:
        NumericsError: the embeddings hold NaN or infinity.
    """
    recorded = replay.record([batch.ids for batch in batches], [batch.beside for batch in batches])
    states: HiddenStates | None = None
    for number, hidden in enumerate(recorded):
        if not bool(torch.isfinite(hidden).all()):
            raise NumericsError(
                f"{instance.source}: the embeddings hold NaN or infinity; check the source checkpoint"
            )
        if states is None:
            states = _empty(instance.device, hidden, batches, folder, states_on_device(instance.device))
        states.store(number, hidden)
    if states is None:
        raise ValueError("calibration needs at least one batch")
    return states


def copied_states(
    instance: ModelInstance,
    states: HiddenStates,
    batches: Sequence[Batch],
    numbers: Sequence[int],
    folder: Path,
) -> HiddenStates:
    """A copy of the states of the batches ``numbers``, with an eighth of the device memory of ``states``."""
    room = min(STATES_BYTES, states_on_device(instance.device)) // 8
    chosen = [batches[number] for number in numbers]
    copy = _empty(instance.device, states.load(0), chosen, folder, room)
    for place, number in enumerate(numbers):
        copy.store(place, states.load(number))
    return copy


def _empty(
    device: torch.device, like: Tensor, batches: Sequence[Batch], folder: Path, device_bytes: int
) -> HiddenStates:
    return HiddenStates(
        [(*batch.ids.shape, *like.shape[2:]) for batch in batches],
        dtype=like.dtype,
        device=device,
        limit_bytes=psutil.virtual_memory().available // 4,
        folder=folder,
        device_bytes=device_bytes,
    )
