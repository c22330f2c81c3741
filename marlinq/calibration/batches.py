"""Batches of documents with similar lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marlinq.calibration.documents import Document

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from marlinq.core.lazy import torch


@dataclass(frozen=True, eq=False)
class Batch:
    """Documents of one batch, padded on the right.

    Attributes:
        ids: int64 [B, T], token ids; 0 after the end of a document.
        lengths: number of real tokens in each row.
        beside: other inputs of the model by name, for a document with images, which is a batch of its own.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    beside: Mapping[str, Tensor] | None = None

    @property
    def padded(self) -> bool:
        """Whether a row is shorter than T."""
        return min(self.lengths) < self.ids.shape[1]

    def mask(self) -> Tensor:
        """bool [B, T], true at real tokens."""
        return torch.arange(self.ids.shape[1])[None, :] < torch.tensor(self.lengths)[:, None]


def make_batches(documents: Sequence[Document], *, token_budget: int, pad: bool = True) -> list[Batch]:
    """Batches of at most ``token_budget`` tokens with padding, documents with images first, then the longest.

    Args:
        documents: at least one document; reordering those of equal length does not change the shapes.
        token_budget: tokens per batch, with padding; a longer document gets a batch of its own.
        pad: False batches only documents of equal length, so that there is no padding.
    """
    batches = [_batch([document]) for document in documents if document.beside is not None]
    rows: list[Document] = []
    for document in sorted((e for e in documents if e.beside is None), key=len, reverse=True):
        # The first row is the longest, so it sets the batch's width.
        if rows and (
            (len(rows) + 1) * len(rows[0]) > token_budget or not (pad or len(document) == len(rows[0]))
        ):
            batches.append(_batch(rows))
            rows = []
        rows.append(document)
    return [*batches, _batch(rows)] if rows else batches


def _batch(rows: Sequence[Document]) -> Batch:
    ids = torch.zeros(len(rows), len(rows[0]), dtype=torch.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row.tokens)
    return Batch(ids, tuple(len(row) for row in rows), rows[0].beside)
