"""Combinations of a recipe's settings that are refused, with the message for each.

Every function takes settings whose own values are valid (:func:`marlinq.core.settings.check_settings`) and
raises UsageError; the message names the setting as its user wrote it.
"""

from __future__ import annotations

from marlinq.core.errors import UsageError
from marlinq.core.rules import Keep, ModuleRules
from marlinq.core.schemes import SCHEMES
from marlinq.core.settings import AUTO, NONE, kinds
from marlinq.core.sparsity import SPARSITIES
from marlinq.formats import FORMATS
from marlinq.methods import METHODS
from marlinq.operations.quantize.module_settings import ModuleSettings
from marlinq.operations.quantize.override import DENSE, SHARED
from marlinq.operations.quantize.quality import DEFAULT, QUALITIES
from marlinq.operations.quantize.recipe_settings import SERVED_BY, TARGETS, RecipeSettings
from marlinq.operations.quantize.spelling import in_command, spelled

MIXED_FORMATS = ("compressed-tensors", "gptq", "gptq-v2")
"""Formats whose config can give each module a scheme of its own."""
FROM_RECIPE = "recipe"
"""``reason`` of a module whose settings are the recipe's own."""


def check_scheme(settings: RecipeSettings) -> None:
    """Refuses a group size, symmetry or sparsity that the scheme does not leave open."""
    named = SCHEMES[settings.scheme]
    if named.granularity is not None and settings.group_size != AUTO:
        raise UsageError(
            f"{spelled('group_size')}: {named.name} has {named.granularity.describe()}; leave it out"
        )
    if named.element.table is not None and not settings.symmetric:
        raise UsageError(f"{spelled('symmetric', False)}: {named.name} has no zero points; leave it out")
    if named.element.table is not None and settings.sparsity != DENSE:
        raise UsageError(
            f"{spelled('sparsity')}: {named.name} weights are not pruned, only integers; leave it out"
        )


def check_target(settings: RecipeSettings) -> None:
    """Refuses what does not go with a target, or with schemes chosen for one."""
    targets = [key for key in TARGETS if getattr(settings, key) != NONE]
    if not (targets or settings.allocation):
        if settings.served_by != SERVED_BY[0]:
            raise UsageError(
                f"{spelled('served_by')}: {settings.served_by} only goes with {spelled('target_bits')} or "
                f"{spelled('target_size')}; leave it out"
            )
        return
    key = (targets or ["allocation"])[0]
    if len(targets) > 1:
        raise UsageError(f"{spelled(targets[1])}: {spelled(key)} is given too; keep one")
    if settings.sparsity != DENSE:
        raise UsageError(
            f"{spelled('sparsity')}: what pruning costs is not measured, so it can't go with "
            f"{spelled(key)}; keep one"
        )
    for other in ("scheme", "group_size"):
        if getattr(settings, other) != getattr(RecipeSettings, other):
            raise UsageError(
                f"{spelled(other)}: {spelled(key)} chooses the scheme of each module; leave it out, or "
                "set it for some with --override, which wins"
            )
    if settings.format not in MIXED_FORMATS:
        raise UsageError(
            f"{spelled(key)}: {settings.format} does not hold schemes that differ between modules; expected "
            f"{spelled('format')} {' or '.join(MIXED_FORMATS[:2])}"
        )


def check_overrides(settings: RecipeSettings) -> None:
    """Refuses an override with an option that the recipe's method does not have."""
    own = (*SHARED, *kinds(METHODS[settings.method].options))
    for override in settings.overrides:
        for key in override.settings:
            if key not in own:
                raise UsageError(
                    f"override {override.pattern!r}: {key}: no option of method {settings.method}; "
                    f"expected one of {', '.join(own)}"
                )


def check_rules(settings: RecipeSettings, rules: ModuleRules[ModuleSettings]) -> None:
    """Refuses rules with an outcome that format or method can't make, and a format that no outcome fits."""
    outcomes = (*(rule.outcome for rule in rules.ordered), rules.default)
    for outcome in outcomes:
        check_outcome(settings, outcome)
    asked = FORMATS[settings.format].sparsity
    if asked is not None and not any(
        isinstance(each, ModuleSettings) and each.sparsity == asked for each in outcomes
    ):
        raise UsageError(
            f"{spelled('format')}: {settings.format} is for {asked.describe()} weights; add "
            f"{spelled('sparsity')} {asked.name}, or choose another {spelled('format')}"
        )


def check_outcome(settings: RecipeSettings, outcome: ModuleSettings | Keep) -> None:
    """Refuses a module's settings that the recipe's format can't hold or their method can't make."""
    if isinstance(outcome, Keep):
        return
    form, method, where = FORMATS[settings.format], METHODS[outcome.method], _place(outcome)
    if form.read_only is not None:
        raise UsageError(f"{where}{form.name} is read and never written: {form.read_only}")
    scheme = outcome.typical
    if scheme.sparsity is not None and scheme.element.table is not None:
        raise UsageError(
            f"{where}sparsity: {scheme.element.name} weights are not pruned, only integers; leave it out"
        )
    if (reason := form.scheme_refusal(scheme)) is not None:
        holding = " or ".join(
            each.name
            for each in FORMATS.values()
            if each.read_only is None
            and each.sparsity in (None, scheme.sparsity, SPARSITIES.get(settings.sparsity))
            and each.scheme_refusal(scheme) is None
        )
        advice = f"choose {spelled('format')} {holding}" if holding else f"choose another {spelled('scheme')}"
        raise UsageError(f"{where}{form.name} can't hold {reason}; {advice}")
    sparse = form.sparsity is not None and scheme.sparsity is not None
    if sparse and (reason := form.layouts[0].scheme_refusal(scheme)) is not None:
        other = f"choose another {spelled('format')}"
        raise UsageError(f"{where}{form.name} can't hold {reason}; {other}")
    if (reason := method.scheme_refusal(scheme)) is not None:
        raise UsageError(f"{where}{_method_refusal(settings.quality, method.name, reason)}")


def _method_refusal(quality: str, method: str, reason: str) -> str:
    """A sentence that says that ``method`` can't make a scheme, and what chose it."""
    if quality != DEFAULT and QUALITIES[quality].settings.get("method") == method:
        return (
            f"{method}, the method of {spelled('quality')} {quality}, can't make {reason}; choose "
            f"another {spelled('quality')}, or {spelled('method')}"
        )
    return f"{method} can't make {reason}; choose another {spelled('method')}"


def _place(outcome: ModuleSettings) -> str:
    """The beginning of a message about the settings of some modules."""
    if outcome.reason == FROM_RECIPE and in_command():
        return ""
    key, _, value = outcome.reason.partition(" ")
    return f"{spelled(key)} {value}: " if key == "quantize_head" else f"{outcome.reason}: "
