"""Builds SVG from elements, so that no text reaches a drawing unescaped.

Names and settings come from checkpoints, which may be hostile. Strings are always text and are escaped; only
:func:`tag` makes markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from marlinq.core.safe_text import escaped

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_VOID = ("rect", "line", "path")


@dataclass(frozen=True)
class HtmlElement:
    """Finished markup, which templates don't escape."""

    markup: str

    def __html__(self) -> str:
        return self.markup


def tag(name: str, /, *children: object, **attributes: object) -> HtmlElement:
    """An element.

    Args:
        name: name of the element.
        children: elements, strings (text, which is escaped), or iterables of both.
        attributes: values are escaped; ``class_`` stands for ``class``, other underscores for hyphens; None
            leaves the attribute out.

    Raises:
        ValueError: the name of the element or of an attribute is not valid.
    """
    parts = [name]
    for key, value in attributes.items():
        written = key.rstrip("_").replace("_", "-")
        if not _NAME.fullmatch(written):
            raise ValueError(f"{written!r}: not the name of an attribute")
        if value is not None:
            parts.append(f'{written}="{escape(escaped(_plain(value)), quote=True)}"')
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r}: not the name of an element")
    opening = " ".join(parts)
    if name in _VOID and not children:
        return HtmlElement(f"<{opening}/>")
    return HtmlElement(f"<{opening}>{joined(children)}</{name}>")


def joined(children: Iterable[object]) -> str:
    """The concatenated markup of several children."""
    return "".join(_markup(child) for child in children)


def style_sheet(rules: str) -> HtmlElement:
    """A ``<style>`` element; ``rules`` must come from marlinq's own source.

    Raises:
        ValueError: the rules contain markup.
    """
    if "<" in rules:
        raise ValueError("a style sheet holds no markup")
    return HtmlElement(f"<style>{rules}</style>")


def _markup(child: object) -> str:
    if child is None:
        return ""
    if isinstance(child, HtmlElement):
        return child.markup
    if isinstance(child, str):
        return escape(escaped(child), quote=True)
    if isinstance(child, Iterable):
        return joined(child)
    raise TypeError(f"expected an element, text or several of them, found {type(child).__name__}")


def _plain(value: object) -> str:
    """Text of an attribute; numbers with at most two decimals, which is enough for coordinates."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
