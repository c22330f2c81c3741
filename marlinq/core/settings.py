"""Settings: fields of a frozen dataclass that carry the values they accept and a description.

A recipe and the options of every method are such dataclasses. Keys, checks, the parsing of ``--override`` and
help texts are all derived from the fields.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import field, fields
from typing import Any, ClassVar

from marlinq.core.errors import UsageError
from marlinq.core.safe_text import shown

AUTO = "auto"
"""Value of a setting that marlinq decides."""
NONE = "none"
"""Value of a setting that is left out."""
_LARGEST = (1 << 63) - 1
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMG]I?B)?", re.ASCII)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


class Kind(ABC):
    """The values that a setting accepts.

    In all methods ``where`` is the beginning of error messages: the setting's source and key.
    """

    @abstractmethod
    def check(self, where: str, value: Any) -> None:
        """Refuse ``value`` unless it is of this kind.

        Raises:
            UsageError: it is of another type, or out of range.
        """

    def parse(self, where: str, text: str) -> Any:
        """The value that a command line spells ``text``.

        Raises:
            UsageError: the text spells no value of this kind.
        """
        self.check(where, text)
        return text


class Flag(Kind):
    """True or false."""

    def check(self, where: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: expected true or false, found {shown(value)}")

    def parse(self, where: str, text: str) -> bool:
        lowered = text.lower()
        if lowered not in (*_TRUE, *_FALSE):
            raise UsageError(f"{where}: expected true or false, found {shown(text)}")
        return lowered in _TRUE


class Choice(Kind):
    """One of ``values`` or ``others``; ``values`` may be a registry that grows later."""

    def __init__(self, values: Collection[Any], *others: Any) -> None:
        self._registered, self._others = values, others

    @property
    def values(self) -> tuple[Any, ...]:
        """Every choice."""
        return (*self._others, *self._registered)

    def check(self, where: str, value: Any) -> None:
        # True == 1 and 64.0 == 64 in Python, but neither is what a recipe means.
        if not any(value == choice and type(value) is type(choice) for choice in self.values):
            choices = ", ".join(map(str, self.values))
            raise UsageError(f"{where}: expected one of {choices}, found {shown(value)}")

    def parse(self, where: str, text: str) -> Any:
        value = next((choice for choice in self.values if str(choice) == text), text)
        self.check(where, value)
        return value


class _Real(Kind):
    """A number in the range that :meth:`allows` checks."""

    meaning: ClassVar[str]

    @abstractmethod
    def allows(self, value: float) -> bool:
        """Whether a number is in range."""

    def check(self, where: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.allows(value):
            raise UsageError(f"{where}: expected {self.meaning}, found {shown(value)}")

    def parse(self, where: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise UsageError(f"{where}: expected a number, found {shown(text)}") from None
        self.check(where, value)
        return value


class Fraction(_Real):
    """A number above 0 and below 1."""

    meaning = "a number above 0 and below 1"

    def allows(self, value: float) -> bool:
        return 0 < value < 1


class Share(_Real):
    """A number from 0 to 1."""

    meaning = "a number from 0 to 1"

    def allows(self, value: float) -> bool:
        return 0 <= value <= 1


class ProperShare(_Real):
    """A number from 0 to below 1."""

    meaning = "a number from 0 to below 1"

    def allows(self, value: float) -> bool:
        return 0 <= value < 1


class WholeNumber(Kind):
    """An integer of at least ``lowest`` that 64 bits hold."""

    def __init__(self, lowest: int) -> None:
        self.lowest = lowest

    def check(self, where: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < self.lowest:
            raise UsageError(
                f"{where}: expected a whole number of at least {self.lowest}, found {shown(value)}"
            )
        if value > _LARGEST:
            raise UsageError(f"{where}: expected a whole number of at most {_LARGEST}, found {shown(value)}")

    def parse(self, where: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise UsageError(f"{where}: expected a whole number, found {shown(text)}") from None
        self.check(where, value)
        return value


class Automatic(Kind):
    """A value of ``kind``, or the word ``auto``."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def check(self, where: str, value: Any) -> None:
        if value != AUTO:
            self.kind.check(where, value)

    def parse(self, where: str, text: str) -> Any:
        return AUTO if text.strip().lower() == AUTO else self.kind.parse(where, text)


class Unset(Kind):
    """A value of ``kind``, or the word ``none``."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def check(self, where: str, value: Any) -> None:
        if value != NONE:
            self.kind.check(where, value)

    def parse(self, where: str, text: str) -> Any:
        return NONE if text.strip().lower() == NONE else self.kind.parse(where, text)


class Bits(_Real):
    """A mean number of bits, above 0 and at most 16."""

    meaning = "a number of bits above 0 and up to 16"

    def allows(self, value: float) -> bool:
        return 0 < value <= 16


class Bytes(WholeNumber):
    """A number of bytes, at least 1; as text also with a unit, such as 6GB or 512MiB."""

    def __init__(self) -> None:
        super().__init__(1)

    def parse(self, where: str, text: str) -> int:
        size = parse_bytes(text)
        if size is None:
            raise UsageError(f"{where}: expected a size such as 6GB or 512MiB, found {shown(text)}")
        return size


def parse_bytes(text: str) -> int | None:
    """The bytes that ``text`` spells, at least 1, such as 5GB or 512MiB; None where it spells no size."""
    match = _SIZE.fullmatch(text.strip().upper())
    return (int(float(match[1]) * _UNITS[match[2] or ""]) or None) if match else None


class Texts(Kind):
    """A name or a path, not empty; or a tuple of at least one."""

    def check(self, where: str, value: Any) -> None:
        if isinstance(value, tuple) and not value:
            raise UsageError(f"{where}: expected a name or path, or a list of them, found an empty list")
        for each in value if isinstance(value, tuple) else (value,):
            Text().check(where, each)


class Text(Kind):
    """A name or a path, not empty."""

    def check(self, where: str, value: Any) -> None:
        if not isinstance(value, str) or not value:
            raise UsageError(f"{where}: expected a name or path, found {shown(value)}")


def setting(default: Any, kind: Kind, meaning: str) -> Any:
    """A dataclass field with its default, the kind of its values, and a description for help texts."""
    return field(default=default, metadata={"kind": kind, "meaning": meaning})


def kinds(settings: type[Any]) -> dict[str, Kind]:
    """The kinds of the settings of a dataclass, by key; other fields are left out."""
    return {f.name: f.metadata["kind"] for f in fields(settings) if "kind" in f.metadata}


def meanings(settings: type[Any]) -> dict[str, str]:
    """Descriptions of the settings of a dataclass, by key."""
    return {f.name: f.metadata["meaning"] for f in fields(settings) if "meaning" in f.metadata}


def check_settings(values: Any) -> None:
    """Check every setting of a dataclass instance.

    Raises:
        UsageError: a value is of the wrong type or out of range; the message begins with its key.
    """
    for key, kind in kinds(type(values)).items():
        kind.check(key, getattr(values, key))
