"""Typed access to an untrusted config object, with errors that name the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.patterns import Containing, Exact, Found, Glob, Named, Pattern, Patterns
from marlinq.core.scheme import Element, integer_element

_LARGEST_GROUP = 1 << 24


class Keys:
    """One config object.

    Args:
        raw: the object as parsed.
        where: name in error messages.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self._patterns = Patterns(where)

    def first(self, *names: str) -> Any:
        """The value of the first of ``names`` that is present and not null."""
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), None)

    def integer(self, *names: str) -> int:
        """The integer under the first of ``names`` that is present."""
        value = self.first(*names)
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {names[0]}: expected an integer, found {value!r}")
        return value

    def element(self, *names: str) -> Element:
        """The integer element whose bits are under the first of ``names`` that is present."""
        try:
            return integer_element(self.integer(*names))
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.where}: {error}") from None

    def granularity(self, *names: str) -> Granularity:
        """The granularity of a group size: -1 for one scale per output channel, or positive."""
        value = self.integer(*names)
        if value != -1 and not 1 <= value < _LARGEST_GROUP:
            raise CheckpointError(f"{self.where}: group_size: expected -1 or positive, found {value}")
        return Granularity.from_group_size(value)

    def boolean(self, name: str, default: bool | None = None) -> bool | None:
        """True, false, or ``default`` where the key is absent."""
        value = self.raw.get(name, default)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"{self.where}: {name}: expected true or false, found {value!r}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; an empty one where the key is absent or null."""
        value = {} if self.raw.get(name) is None else self.raw[name]
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {name}: expected an object, found {value!r}")
        return value

    def names(self, name: str) -> list[str]:
        """A list of module names; an empty one where the key is absent or null."""
        value = [] if self.raw.get(name) is None else self.raw[name]
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CheckpointError(f"{self.where}: {name}: expected a list of module names, found {value!r}")
        return value

    def pattern(self, text: str) -> Pattern:
        """A regular expression that a module's name has to begin with."""
        return self._patterns.compile(text)

    def search(self, text: str) -> Found:
        """A regular expression that is found anywhere in a name."""
        return Found(self._patterns.compile(text))

    def exact(self, name: str) -> Exact:
        """A pattern that matches one name only."""
        return Exact(name)

    def named(self, name: str) -> Named:
        """A pattern that matches a full name, the end of one, or the modules inside of one."""
        return Named(name)

    def glob(self, pattern: str) -> Glob:
        """A pattern with ``*`` for any text."""
        return Glob(pattern)

    def containing(self, part: str) -> Containing:
        """A pattern that matches the names that contain ``part``."""
        return Containing(part)
