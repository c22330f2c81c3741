"""The schemes that an allocation chooses from, by their names in a recipe's ``allocation``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from marlinq.core.errors import UsageError
from marlinq.core.safe_text import shown

KEPT = "unquantised"
"""Name of the candidate that leaves weights unquantised."""


@dataclass(frozen=True)
class Candidate:
    """One scheme that a module may get.

    Attributes:
        name: name in recipes and reports.
        settings: recipe override that gives a module this scheme; None leaves the module unquantised.
    """

    name: str
    settings: Mapping[str, Any] | None


CANDIDATES: dict[str, Candidate] = {
    each.name: each
    for each in (
        Candidate("int4/128", {"scheme": "int4", "group_size": 128}),
        Candidate("int4/64", {"scheme": "int4", "group_size": 64}),
        Candidate("int4/32", {"scheme": "int4", "group_size": 32}),
        # One scale per channel: groups would cost INT8 up to half a bit per weight, and its error is small
        # beside that of any 4-bit scheme anyway.
        Candidate("int8", {"scheme": "int8", "group_size": -1}),
        Candidate("fp8", {"scheme": "fp8"}),
        Candidate(KEPT, None),
    )
}
"""Every candidate by name, from the fewest bits per weight to the most."""


@dataclass(frozen=True)
class Members:
    """Modules of one candidate, named themselves or through a parent, such as a layer's ``experts``."""

    names: frozenset[str]

    def matches(self, module: str) -> bool:
        """Whether ``module`` or one of its parents is among the names."""
        while module:
            if module in self.names:
                return True
            module = module.rpartition(".")[0]
        return False


def read_allocation(value: Any) -> dict[str, tuple[str, ...]]:
    """Reads a recipe's ``allocation``: candidate -> names of modules.

    Raises:
        UsageError: ``value`` is no such mapping, a candidate is unknown, or a module is named twice.
    """
    if not isinstance(value, Mapping):
        raise UsageError(
            f"recipe: allocation: expected modules by candidate ({', '.join(CANDIDATES)}), found "
            f"{shown(value)}"
        )
    by_candidate: dict[str, tuple[str, ...]] = {}
    for name, members in value.items():
        if name not in CANDIDATES:
            raise UsageError(
                f"recipe: allocation: expected one of {', '.join(CANDIDATES)}, found {shown(name)}"
            )
        if not isinstance(members, (list, tuple)) or not all(isinstance(each, str) for each in members):
            raise UsageError(
                f"recipe: allocation: {name}: expected a list of modules, found {shown(members)}"
            )
        by_candidate[name] = tuple(members)
    _check_once(by_candidate.values())
    return by_candidate


def _check_once(lists: Iterable[tuple[str, ...]]) -> None:
    seen: set[str] = set()
    for name in (each for members in lists for each in members):
        if name in seen:
            raise UsageError(f"recipe: allocation: {shown(name)} is there twice; keep one")
        seen.add(name)
