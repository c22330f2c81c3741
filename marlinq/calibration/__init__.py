"""Calibration text: sources, documents, batches, and the hidden states between decoder blocks."""

from __future__ import annotations

from marlinq.calibration.batches import Batch, make_batches
from marlinq.calibration.chat import Chat, render_chat
from marlinq.calibration.documents import (
    MIN_TOKENS,
    Document,
    Duplicates,
    check_tokens,
    documents_hash,
    load_tokenizer,
    read_documents,
)
from marlinq.calibration.hidden import HiddenStates
from marlinq.calibration.mixture import MixturePart, read_part, shares
from marlinq.calibration.sources import read_passages

__all__ = [
    "MIN_TOKENS",
    "Batch",
    "Chat",
    "Document",
    "Duplicates",
    "HiddenStates",
    "MixturePart",
    "check_tokens",
    "documents_hash",
    "load_tokenizer",
    "make_batches",
    "read_documents",
    "read_part",
    "read_passages",
    "render_chat",
    "shares",
]
