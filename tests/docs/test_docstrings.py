"""Explanations of attributes and arguments begin with what each is, not with its relation to another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SECTION = re.compile(r"^( *)(?:Args|Attributes):\n((?:\1    .*\n)+)", re.MULTILINE)
_RELATION = re.compile(r"^ *[\w, ]+: ((?:of the|the same|whose|what)\b.*)", re.MULTILINE | re.IGNORECASE)


def relations(text: str) -> Iterator[str]:
    """Explanations in a file's docstrings that only the lines around them make clear."""
    for section in _SECTION.finditer(text):
        yield from (line[1] for line in _RELATION.finditer(section[2]))


def test_explanations_begin_with_what_a_thing_is() -> None:
    files = [path for room in ("marlinq", "emulation") for path in (ROOT / room).rglob("*.py")]
    assert len(files) > 400
    riddles = {
        str(path.relative_to(ROOT)): lines
        for path in files
        if (lines := list(relations(path.read_text(encoding="utf-8"))))
    }
    assert riddles == {}


def test_a_relation_is_found() -> None:
    text = '''
    """A row.

    Attributes:
        width: channels of the row.
        offset: of the row after it.
        stride, pitch: the same in bytes.

    Raises:
        ValueError: of the caller.
    """
'''
    assert list(relations(text)) == ["of the row after it.", "the same in bytes."]
