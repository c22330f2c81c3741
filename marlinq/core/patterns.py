"""Regular expressions from recipes, options and configs: bounded in length, compiled size and matching time.

Backtracking can take practically for ever, and counted repetitions are unrolled when a pattern is compiled:
``(?:a{1000}){1000}`` takes gigabytes.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import regex

from marlinq.core.errors import CheckpointError, MarlinqError

MAX_CHARACTERS = 10_000
"""Characters at most of a pattern, and of a text that is searched."""

MAX_REPETITIONS = 256
"""Copies of a part that counted repetitions may make; patterns of module names rarely count beyond ten."""

MATCH_SECONDS = 2.0
"""Seconds for one match; an honest one takes microseconds."""

TOTAL_SECONDS = 10.0
"""Seconds for all slow matches together of the patterns of one source."""

# Matches faster than this don't count as slow.
_HONEST_SECONDS = 1e-3

_REPETITION = re.compile(r"\{([^{}]*)\}")
# White space and comments inside a repetition would hide its count.
_VERBOSE = re.compile(r"\(\?[A-Za-z0-9]*x")


class Patterns:
    """The patterns of one source, which share :data:`TOTAL_SECONDS`.

    Args:
        source: file and key, or option, of the patterns; error messages begin with it.
        error: class of exceptions for bad patterns.
    """

    def __init__(self, source: str, error: type[MarlinqError] = CheckpointError) -> None:
        self.source = source
        self.error = error
        self.seconds_left = TOTAL_SECONDS

    def compile(self, text: str) -> Pattern:
        """The pattern ``text`` in the syntax of Python's ``re``.

        Raises:
            MarlinqError: of the class given: too long, too large, or no regular expression.
        """
        where = f"{self.source}: pattern {_short(text)}"
        if len(text) > MAX_CHARACTERS:
            raise self.error(
                f"{where}: {len(text)} characters, at most {MAX_CHARACTERS} expected; shorten it"
            )
        if _VERBOSE.search(text):
            raise self.error(f"{where}: the flag x (verbose) is not supported; write it without spaces")
        copies = math.prod(map(_least_count, _REPETITION.findall(text)))
        if copies > MAX_REPETITIONS:
            raise self.error(
                f"{where}: its counted repetitions make {copies:.3g} copies, at most {MAX_REPETITIONS} "
                "expected; replace it by a simpler one"
            )
        try:
            return Pattern(text, regex.compile(text), self)
        except (regex.error, ValueError, OverflowError, RecursionError, MemoryError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise self.error(
                f"{where}: not a regular expression ({reason}); escape special characters"
            ) from None


class Pattern:
    """A compiled pattern; :meth:`Patterns.compile` makes it."""

    def __init__(self, text: str, compiled: regex.Pattern[str], owner: Patterns) -> None:
        self.text = text
        self._compiled = compiled
        self._owner = owner

    def matches(self, name: str) -> bool:
        """Whether ``name`` begins with a match, as ``re.match`` does.

        Raises:
            MarlinqError: of the owner's class: it takes too long.
        """
        return self._within_time(self._compiled.match, name)

    def found_in(self, name: str) -> bool:
        """Whether a match stands anywhere in ``name``, as ``re.search`` does.

        Raises:
            MarlinqError: of the owner's class: it takes too long.
        """
        return self._within_time(self._compiled.search, name)

    def _within_time(self, look: Callable[..., object], name: str) -> bool:
        owner = self._owner
        if len(name) > MAX_CHARACTERS:
            raise owner.error(f"{owner.source}: a name of {len(name)} characters is too long to be matched")
        start = time.monotonic()
        try:
            if owner.seconds_left <= 0:
                raise TimeoutError
            return look(name, timeout=min(MATCH_SECONDS, owner.seconds_left)) is not None
        except (TimeoutError, MemoryError):
            raise owner.error(
                f"{owner.source}: pattern {_short(self.text)} takes too long to match {_short(name)}; "
                "replace it by a simpler one"
            ) from None
        finally:
            taken = time.monotonic() - start
            # Fast matches don't count, however many modules and rules there are.
            owner.seconds_left -= taken if taken > _HONEST_SECONDS else 0


@dataclass(frozen=True)
class Found:
    """Matches the names that a pattern is found in, as ``re.search`` does."""

    pattern: Pattern

    def matches(self, name: str) -> bool:
        """Whether the pattern is found in ``name``.

        Raises:
            MarlinqError: as :meth:`Pattern.found_in`.
        """
        return self.pattern.found_in(name)


@dataclass(frozen=True)
class Exact:
    """Matches one name only; no regular expression is involved."""

    name: str

    def matches(self, name: str) -> bool:
        """Whether ``name`` is equal."""
        return name == self.name


@dataclass(frozen=True)
class Named:
    """Matches a module by its full name, by the last parts of it, or by the name of a module that contains
    it; no regular expression is involved."""

    name: str

    def matches(self, name: str) -> bool:
        """Whether ``name`` is that module's."""
        return f".{name}".endswith(f".{self.name}") or name.startswith(f"{self.name}.")


@dataclass(frozen=True)
class Glob:
    """Matches names by a pattern in which ``*`` stands for any text, and all modules inside of those; no
    regular expression is involved."""

    pattern: str

    def matches(self, name: str) -> bool:
        """Whether the pattern describes ``name``, or a module that contains it."""
        parts = self.pattern.split("*")
        if len(parts) == 1:
            return name == self.pattern or name.startswith(f"{self.pattern}.")
        first, *inner, last = parts
        if not name.startswith(first) or not name.endswith(last):
            return False
        at = len(first)
        for part in inner:
            at = name.find(part, at)
            if at < 0:
                return False
            at += len(part)
        return at + len(last) <= len(name)


@dataclass(frozen=True)
class Containing:
    """Matches the names that contain ``part``; no regular expression is involved."""

    part: str

    def matches(self, name: str) -> bool:
        """Whether ``part`` stands anywhere in ``name``."""
        return self.part in name


def _least_count(inside: str) -> int:
    """Copies that ``{inside}`` makes of the part before it: the lower bound, 1 where it has none."""
    digits = re.match(r"\s*(\d{1,9})", inside)
    return max(int(digits[1]), 1) if digits else 1


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
