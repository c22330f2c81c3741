"""Rules of a recipe for the modules whose names a pattern is found in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from marlinq.core.errors import UsageError
from marlinq.core.patterns import MAX_CHARACTERS, Pattern, Patterns
from marlinq.core.schemes import SCHEMES
from marlinq.core.settings import AUTO, NONE, Choice, Flag, Kind, kinds
from marlinq.core.sparsity import SPARSITIES
from marlinq.methods import METHODS

GROUP_SIZES = (32, 64, 128, -1, AUTO)
DENSE = NONE
"""Value of ``sparsity`` for weights that are not pruned."""


@dataclass(frozen=True)
class Override:
    """A rule for the modules whose full name matches a pattern.

    Attributes:
        pattern: case-sensitive regular expression that matches anywhere in the name (as ``re.search``):
            ``down_proj`` matches every down projection, ``^model\\.layers\\.0\\.`` the first block.
        skip: whether the modules stay unquantised.
        settings: changed settings, empty with ``skip``: scheme, group_size, symmetric, sparsity and options
            of the recipe's method.

    Raises:
        UsageError: the pattern or a setting is invalid, or there is neither ``skip`` nor a setting.
    """

    pattern: str
    skip: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ = self._compiled
        if self.skip == bool(self.settings):
            raise UsageError(
                f"override {self.pattern!r}: expected either skip or settings such as group_size=32"
            )
        known = _kinds_of_a_module()
        for key, value in self.settings.items():
            where = f"override {self.pattern!r}: {key}"
            if key not in known:
                raise UsageError(f"{where}: unknown key; expected one of {', '.join(known)}")
            known[key].check(where, value)

    @cached_property
    def _compiled(self) -> Pattern:
        return Patterns("override", UsageError).compile(self.pattern)

    def matches(self, module: str) -> bool:
        """Whether the pattern matches the full name ``module``.

        Raises:
            UsageError: matching takes too long.
        """
        return self._compiled.found_in(module)

    @classmethod
    def parse(cls, text: str) -> Override:
        """Reads the command line's ``REGEX=skip`` or ``REGEX=key=value[,key=value...]``.

        Keys are those of a recipe; ``sym`` is short for ``symmetric``. The regular expression may contain
        ``=``, because settings are the longest tail of the text that has the form of settings.

        Raises:
            UsageError: the text has neither form, or a value is out of range.
        """
        if len(text) > 2 * MAX_CHARACTERS:
            raise UsageError(f"--override: {len(text)} characters, at most {2 * MAX_CHARACTERS} expected")
        if text.endswith("=skip") and text != "=skip":
            return cls(text.removesuffix("=skip"), skip=True)
        known = _kinds_of_a_module()
        names = "|".join([*map(re.escape, known), "sym"])
        match = re.fullmatch(rf"(.+?)=((?:{names})=[^=,]+(?:,(?:{names})=[^=,]+)*)", text)
        if match is None:
            raise UsageError(
                f"--override {text!r}: expected REGEX=skip or REGEX=key=value[,key=value] with a key of "
                f"{', '.join(known)}"
            )
        settings: dict[str, Any] = {}
        for item in match[2].split(","):
            key, value = item.split("=")
            key = "symmetric" if key == "sym" else key
            if key in settings:
                raise UsageError(f"--override {text!r}: {key} is given twice; keep one")
            settings[key] = known[key].parse(f"--override {text!r}: {key}", value.strip())
        return cls(match[1], settings=settings)

    def to_dict(self) -> dict[str, Any]:
        """A plain mapping for YAML and JSON."""
        return (
            {"match": self.pattern, "skip": True} if self.skip else {"match": self.pattern, **self.settings}
        )


def override_of(rule: Any) -> Override:
    if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
        raise UsageError(
            f"recipe: overrides: expected a mapping with a regular expression 'match', found {rule!r}"
        )
    settings = {key: value for key, value in rule.items() if key not in ("match", "skip")}
    skip = rule.get("skip", False)
    Flag().check(f"override {rule['match']!r}: skip", skip)
    return Override(rule["match"], skip=skip, settings=settings)


SHARED: Mapping[str, Kind] = {
    "scheme": Choice(SCHEMES),
    "group_size": Choice(GROUP_SIZES),
    "symmetric": Flag(),
    "sparsity": Choice(SPARSITIES, DENSE),
}
"""Keys that an override may change with every method, with their kinds of values."""


def _kinds_of_a_module() -> dict[str, Kind]:
    """Keys that an override may have, with their kinds of values: shared keys and options of all methods."""
    known = dict(SHARED)
    for method in METHODS.values():
        known = kinds(method.options) | known
    return {**SHARED, **known}
