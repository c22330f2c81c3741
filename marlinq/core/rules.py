"""Which modules are quantised, and how: ordered patterns that resolve to a scheme or to a reason not to.

Recipes, overrides and every ``quantization_config`` dialect resolve to these values: a dialect to
:class:`Rules`, whose outcomes are schemes; a recipe to :class:`ModuleRules` of a scheme and its method's
options.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from marlinq.core.scheme import Scheme

T = TypeVar("T")


class Matcher(Protocol):
    """Decides which modules a rule applies to."""

    def matches(self, module: str) -> bool:
        """Whether the rule applies to ``module``, a full dotted name.

        Raises:
            MarlinqError: the pattern takes too long; the message names its source.
        """
        ...


@dataclass(frozen=True)
class Keep:
    """The module stays unquantised; ``reason`` is text that says why."""

    reason: str


@dataclass(frozen=True)
class Rule(Generic[T]):
    """The outcome for all modules that ``matcher`` matches."""

    matcher: Matcher
    outcome: T | Keep


@dataclass(frozen=True)
class ModuleRules(Generic[T]):
    """Ordered rules; the first that matches a module decides.

    Attributes:
        default: outcome of modules that no rule matches.
        ordered: the rules, first ones first.
    """

    default: T | Keep
    ordered: tuple[Rule[T], ...] = ()

    def outcome(self, module: str) -> T | Keep:
        """The outcome of ``module``, a full dotted name; a :class:`Keep` where it stays unquantised."""
        for rule in self.ordered:
            if rule.matcher.matches(module):
                return rule.outcome
        return self.default


class Rules(ModuleRules[Scheme]):
    """Rules that say how modules are quantised."""

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of ``module``, or None when it is kept."""
        outcome = self.outcome(module)
        return outcome if isinstance(outcome, Scheme) else None
