"""Whether two folders' tokenizers give the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marlinq.core import boundaries
from marlinq.core.display import counted

_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "merges.txt",
    "added_tokens.json", "special_tokens_map.json",
)  # fmt: skip


def same_tokenizer_files(mine: Path, theirs: Path) -> bool:
    """Whether both folders have the same files of a tokenizer, byte for byte."""

    def content(path: Path) -> bytes | None:
        return path.read_bytes() if path.is_file() else None

    return all(content(mine / name) == content(theirs / name) for name in _FILES)


def moved_tokens(mine: Any, theirs: Any) -> str | None:
    """A clause about tokens that have other numbers in the tokenizer ``mine`` than in ``theirs``, or None.

    Tokens that only one of them has don't count.

    Raises:
        CheckpointError: a tokenizer's own code fails.
    """
    with boundaries.tokenizer(mine):
        ours = mine.get_vocab()
    with boundaries.tokenizer(theirs):
        others = theirs.get_vocab()
    moved = [token for token, number in others.items() if ours.get(token, number) != number]
    if not moved:
        return None
    token = min(moved, key=others.__getitem__)
    return (
        f"{counted(len(moved), 'tokens')} with other numbers than the original's, such as {token[:40]!r}: "
        f"{ours[token]} instead of {others[token]}"
    )
