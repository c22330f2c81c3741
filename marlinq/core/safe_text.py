"""Make untrusted text, such as names in a checkpoint, safe to print in reports and messages.

A line break in a name would fake a line of a report, an escape code would act on the terminal, and half of a
surrogate pair can't be written at all.
"""

from __future__ import annotations

import json
import unicodedata
from typing import Any, TextIO

_LONGEST_LINE = 4_000
_LONGEST_VALUE = 200


def escaped(text: str) -> str:
    """``text`` with every character that is not printable as a backslash escape, line breaks included."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else _escape(character) for character in text)


def prose(text: str) -> str:
    """Text that a model wrote, with all that acts on a terminal escaped; line breaks, tabs and joiners
    stay."""
    if text.isprintable():
        return text
    return "".join(
        _escape(character)
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t"
        else character
        for character in text
    )


def one_line(text: str) -> str:
    """``text`` in one printable line of a readable length."""
    line = escaped(" ".join(text.split()))
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


def shown(value: object) -> str:
    """``repr`` of any value, shortened for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python prints no integer of more than 4,300 digits, and no list that nests too deep.
        return f"a value of type {type(value).__name__} that can't be printed"
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def half_pair(text: str) -> str | None:
    """Escape of the first half of a surrogate pair in ``text``, which no encoding can hold; None if there is
    none. JSON's escapes make such text, and Python makes it of a command line that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return _escape(text[error.start])
    return None


def json_text(value: Any, file: TextIO, *, indent: int | None = None) -> str:
    """``value`` as JSON that ``file`` can hold: printable characters, and the line breaks of ``indent``."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    if encodable(text, file) != text:
        text = json.dumps(value, indent=indent, ensure_ascii=True, allow_nan=False)
    lines = (line if line.isprintable() else "".join(map(_json_escape, line)) for line in text.split("\n"))
    return "\n".join(lines)


def encodable(text: str, file: TextIO) -> str:
    """``text`` with escapes for characters that the encoding of ``file`` lacks."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _json_escape(character: str) -> str:
    if character.isprintable():
        return character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
