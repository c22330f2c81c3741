"""Read untrusted JSON and YAML as plain values of bounded depth, count and size.

Without bounds the libraries follow aliases (300 bytes can stand for gigabytes), make objects that a tag
names, nest until later code exhausts the stack, and read integers that can't be printed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import yaml

MAX_DEPTH = 100
"""Lists and mappings at most inside each other; honest files have some ten."""

MAX_DIGITS = 40
"""Characters of an integer at most; the longest honest one known is a tokenizer's 10**30."""

MAX_YAML_BYTES = 256 << 10
"""Bytes at most of a recipe, or of a model card's front matter."""

MAX_YAML_VALUES = 20_000
"""Values at most in one YAML text; so many take up to half a second to read."""

_OTHERS = bytes(sorted(set(range(256)) - set(b"[]{}")))
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_TAG = "tag:yaml.org,2002:"
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def check_depth(text: bytes) -> None:
    """Refuse JSON whose lists and objects nest deeper than :data:`MAX_DEPTH`.

    Raises:
        ValueError: it does.
    """
    # Only brackets are kept, and innermost pairs are removed level by level. If any remain, brackets inside
    # strings may be the reason, so the text is then read token by token.
    brackets = text.translate(None, _OTHERS)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return
        left = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(left) == len(brackets):
            break
        brackets = left
    depth = 0
    for token in _TOKENS.finditer(text):
        first = token[0][:1]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")


def read_int(digits: str) -> int:
    """An integer of at most :data:`MAX_DIGITS` characters.

    Raises:
        ValueError: it has more.
    """
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits, at most {MAX_DIGITS} expected")
    return int(digits)


def load_json(
    text: bytes,
    *,
    pairs: Callable[[list[tuple[str, Any]]], Any] | None = None,
    constant: Callable[[str], Any] | None = None,
    integer: Callable[[str], int] = read_int,
) -> Any:
    """The value of JSON in UTF-8.

    Args:
        text: the JSON.
        pairs: makes an object of its keys and values, as in :func:`json.loads`.
        constant: reads NaN and infinities, as in :func:`json.loads`.
        integer: reads an integer.

    Raises:
        ValueError: it is no JSON in UTF-8, nests too deep, or has integers that are too long.
    """
    check_depth(text)
    # json.loads would guess the encoding of bytes, and accept halves of surrogate pairs.
    return json.loads(
        text.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant, parse_int=integer
    )


def load_yaml(text: bytes) -> Any:
    """The value of one YAML document in UTF-8: mappings with text as keys, lists, text, numbers, truth values
    and null.

    Tags, anchors and aliases are refused, as are keys that stand twice. A date is text, and so is ``2:4``,
    which YAML 1.1 reads as 124, a number to the base of 60.

    Raises:
        ValueError: it is no such document, or too large.
    """
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(f"{len(text)} bytes, at most {MAX_YAML_BYTES} expected")
    try:
        return _Document(yaml.SafeLoader(text.decode("utf-8"))).value()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


class _Document:
    """Builds the value of a YAML document from the parser's events, without recursion."""

    def __init__(self, loader: yaml.SafeLoader) -> None:
        self._loader = loader
        self._open: list[list[Any] | dict[str, Any]] = []
        self._keys: list[str | None] = []
        self._count = 0

    def value(self) -> Any:
        result: Any = None
        while (event := self._loader.get_event()) is not None:  # type: ignore[no-untyped-call]
            line = event.start_mark.line + 1
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
                raise ValueError(f"line {line}: anchors and aliases are not supported; write the value out")
            if getattr(event, "tag", None) is not None:
                raise ValueError(f"line {line}: the tag {event.tag[:80]!r} is not supported; leave it out")
            if isinstance(event, yaml.DocumentStartEvent) and self._count:
                raise ValueError(f"line {line}: a second document")
            if isinstance(event, (yaml.SequenceEndEvent, yaml.MappingEndEvent)):
                self._open.pop()
                self._keys.pop()
            elif isinstance(event, yaml.NodeEvent):
                made = self._made(event, line)
                if self._open:
                    self._add(made, line)
                else:
                    result = made
                if isinstance(made, (list, dict)):
                    self._open.append(made)
                    self._keys.append(None)
                    if len(self._open) > MAX_DEPTH:
                        raise ValueError(f"line {line}: nested deeper than {MAX_DEPTH}")
        return result

    def _made(self, event: yaml.NodeEvent, line: int) -> Any:
        self._count += 1
        if self._count > MAX_YAML_VALUES:
            raise ValueError(f"more than {MAX_YAML_VALUES} values")
        if isinstance(event, yaml.SequenceStartEvent):
            return []
        if isinstance(event, yaml.MappingStartEvent):
            return {}
        is_key = self._open and isinstance(self._open[-1], dict) and self._keys[-1] is None
        assert isinstance(event, yaml.ScalarEvent)
        if is_key:
            return str(event.value)
        try:
            return self._scalar(event)
        except ValueError as error:
            raise ValueError(f"line {line}: {error}") from None

    def _add(self, made: Any, line: int) -> None:
        inner = self._open[-1]
        if isinstance(inner, list):
            inner.append(made)
        elif self._keys[-1] is None:
            if not isinstance(made, str):
                raise ValueError(f"line {line}: expected a name as key, found a list or mapping")
            if made in inner:
                raise ValueError(f"line {line}: the key {made[:80]!r} stands twice")
            self._keys[-1] = made
        else:
            inner[self._keys[-1]] = made
            self._keys[-1] = None

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        text = event.value
        if not event.implicit[0]:
            return text  # it stands in quotes
        tag = self._loader.resolve(yaml.ScalarNode, text, event.implicit)  # type: ignore[no-untyped-call]
        if tag == f"{_TAG}null":
            return None
        if tag == f"{_TAG}bool":
            return _WORDS[text.lower()]
        if tag not in (f"{_TAG}int", f"{_TAG}float") or ":" in text:
            return text
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a number of {len(text)} characters, at most {MAX_DIGITS} expected")
        node = yaml.ScalarNode(tag, text)
        made = self._loader.construct_yaml_int if tag.endswith("int") else self._loader.construct_yaml_float
        return made(node)
