"""Stores the hidden states of all calibration batches between two decoder blocks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marlinq.core.errors import OutputError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


class HiddenStates:
    """One tensor per batch: on the device, in host memory, or in a memory-mapped file, by their size.

    Args:
        shapes: shape of each batch's states, [B, T, hidden].
        dtype: dtype of the states.
        device: device that uses them; for a GPU, host memory is pinned.
        device_bytes: bytes up to which all states stay on the device, unless another process has taken them.
        limit_bytes: bytes above which a file is used instead of host memory.
        folder: folder of that file, which has no name and vanishes with the process.

    Raises:
        OutputError: the file can't be made, or the disk is too full for it.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        limit_bytes: int,
        folder: Path,
        device_bytes: int = 0,
    ) -> None:
        sizes = [prod(shape) for shape in shapes]
        total = sum(sizes)
        flat = _on_device(total, dtype, device) if total * dtype.itemsize <= device_bytes else None
        self.on_disk = flat is None and total * dtype.itemsize > limit_bytes
        if self.on_disk:
            flat = torch.from_numpy(_mapped_file(folder, total * dtype.itemsize)).view(dtype)
        elif flat is None:
            flat = torch.empty(total, dtype=dtype, pin_memory=device.type == "cuda")
        starts = [0, *accumulate(sizes)]
        self._batches = [
            flat[start : start + size].view(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]
        self._device = device

    def __len__(self) -> int:
        return len(self._batches)

    def load(self, batch: int) -> Tensor:
        """A copy of a batch's states on the device, which a block may change in place."""
        return self._batches[batch].to(self._device, non_blocking=True, copy=True)

    def store(self, batch: int, states: Tensor) -> None:
        """Replaces the states of a batch."""
        self._batches[batch].copy_(states)


def _on_device(count: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Room for ``count`` numbers, or None where the device has less left than was measured."""
    try:
        return torch.empty(count, dtype=dtype, device=device)
    except torch.OutOfMemoryError:
        return None


def _mapped_file(folder: Path, nbytes: int) -> Any:
    """A nameless file of ``nbytes`` as an array of bytes."""
    import numpy as np

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Allocates the blocks now: writing to a sparse file on a full disk would kill the process.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return np.memmap(file, dtype=np.uint8, mode="r+")
    except OSError as error:
        raise OutputError(
            f"{folder}: no room for {nbytes / 1e9:.1f} GB of hidden states ({error.strerror or error}); "
            "free some, or lower --samples or --max-length"
        ) from None
