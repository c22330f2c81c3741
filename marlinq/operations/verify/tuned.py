"""Checks norms and biases that tuning changed (``--tune-norms``), which are not copies of the original's.

The manifest names them. They must still be near the original's: tuning changes an element by a few hundredths
of the vector's root mean square.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from marlinq.checkpoint import MANIFEST
from marlinq.checkpoint.reader import read_json

_LARGEST_MOVE = 1.0
"""Largest change of an element, in units of the original vector's root mean square."""


def tuned_vectors(folder: Path) -> set[str]:
    """Stored names of the vectors tuned by the run that wrote ``folder``, or the folder it was converted
    from.

    Empty without a manifest, and without tuning.
    """
    if not (folder / MANIFEST).exists():
        return set()
    level: object = read_json(folder, MANIFEST)
    names: set[str] = set()
    while isinstance(level, dict):
        notes = level.get("run")
        tuning = notes.get("tuning") if isinstance(notes, dict) else None
        vectors = tuning.get("vectors") if isinstance(tuning, dict) else None
        if isinstance(vectors, list):
            names.update(name for name in vectors if isinstance(name, str))
        level = level.get("source")
    return names


def too_far(mine: Tensor, theirs: Tensor) -> str | None:
    """Why ``mine`` is too far from ``theirs`` for tuning (both float [n]), or None."""
    if mine.dim() != 1:
        return f"expected a vector, found shape {list(mine.shape)}"
    if not bool(torch.isfinite(mine).all()):
        return "holds NaN or infinity"
    size = float(theirs.float().square().mean().sqrt()) or 1.0
    moved = float((mine.float() - theirs.float()).abs().max()) / size
    if moved > _LARGEST_MOVE:
        return f"an element moved by {moved:.2f} of the vector's size, more than tuning does"
    return None
