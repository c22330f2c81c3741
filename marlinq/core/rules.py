"""Which modules are quantised, and how: ordered patterns that resolve to a scheme or to a reason not to.

Recipes, overrides and every ``quantization_config`` dialect resolve to this one value. Mixed precision is a
matter of rules alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from marlinq.core.scheme import Scheme


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
class Rule:
    """What becomes of the modules that ``matcher`` means."""

    matcher: Matcher
    outcome: Scheme | Keep


@dataclass(frozen=True)
class Rules:
    """Ordered rules; the first that matches a module decides.

    Attributes:
        default: for modules that no rule is about.
        ordered: the rules.
    """

    default: Scheme | Keep
    ordered: tuple[Rule, ...] = ()

    def outcome(self, module: str) -> Scheme | Keep:
        """The scheme of ``module`` (its full dotted name), or why it is kept."""
        for rule in self.ordered:
            if rule.matcher.matches(module):
                return rule.outcome
        return self.default

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of ``module``, or None when it is kept."""
        found = self.outcome(module)
        return found if isinstance(found, Scheme) else None
