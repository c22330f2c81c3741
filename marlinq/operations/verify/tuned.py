"""Unquantised vectors that a quantise run tuned (``--tune-norms``): norms and biases that are no copies.

The manifest names them. They have to be near the original's all the same: tuning moves an element by a few
hundredths of the vector's size a run.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from marlinq.checkpoint import MANIFEST
from marlinq.checkpoint.reader import read_json

# A vector that is moved by its own root mean square is no longer the original's.
_LARGEST_MOVE = 1.0


def tuned_vectors(folder: Path) -> set[str]:
    """Stored names of the vectors that were tuned for ``folder``, or for what it was converted from.

    Empty for folders without a manifest, or whose manifest says nothing of the kind.
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
    """Why ``mine`` is no tuned version of ``theirs``, both float [n], or None."""
    if mine.dim() != 1:
        return f"expected a vector, found shape {list(mine.shape)}"
    if not bool(torch.isfinite(mine).all()):
        return "holds NaN or infinity"
    size = float(theirs.float().square().mean().sqrt()) or 1.0
    moved = float((mine.float() - theirs.float()).abs().max()) / size
    if moved > _LARGEST_MOVE:
        return f"an element moved by {moved:.2f} of the vector's size, more than tuning does"
    return None
