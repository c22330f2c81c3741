"""Which modules are quantised, and how: ordered patterns that resolve to a scheme or to a reason not to.

Recipes, overrides and every ``quantization_config`` dialect resolve to these values: a dialect to
:class:`Rules`, whose outcomes are schemes; a recipe to :class:`ModuleRules` of a scheme and its method's
options. Mixed precision is a matter of rules alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from marlinq.core.scheme import Scheme

T = TypeVar("T")


class Matcher(Protocol):
    """Says whether a rule is about a module."""

    def matches(self, module: str) -> bool:
        """Whether ``module``, a full dotted name, is meant.

        Raises:
            MarlinqError: the pattern takes too long; the message names where it stands.
        """
        ...


@dataclass(frozen=True)
class Keep:
    """The module stays unquantised; ``reason`` says why, for people."""

    reason: str


@dataclass(frozen=True)
class Rule(Generic[T]):
    """What becomes of the modules that ``matcher`` means."""

    matcher: Matcher
    outcome: T | Keep


@dataclass(frozen=True)
class ModuleRules(Generic[T]):
    """Ordered rules; the first that matches a module decides.

    Attributes:
        default: for modules that no rule is about.
        ordered: the rules.
    """

    default: T | Keep
    ordered: tuple[Rule[T], ...] = ()

    def outcome(self, module: str) -> T | Keep:
        """What becomes of ``module`` (its full dotted name), or why it is kept."""
        for rule in self.ordered:
            if rule.matcher.matches(module):
                return rule.outcome
        return self.default


class Rules(ModuleRules[Scheme]):
    """Rules that say how modules are quantised."""

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of ``module``, or None when it is kept."""
        found = self.outcome(module)
        return found if isinstance(found, Scheme) else None
