"""Settings of a recipe that were changed and do nothing, because of its other settings."""

from __future__ import annotations

from dataclasses import fields

from marlinq.methods import METHODS
from marlinq.operations.quantize.module_settings import ModuleSettings
from marlinq.operations.quantize.quality import QUALITIES
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.recipe_settings import UNQUANTIZED
from marlinq.operations.quantize.spelling import spelled

_EXPERTS = ("experts", "expert_tokens", "expert_fallback")
_TEXT = ("calibration", "samples", "tokens", "max_length", "chat_template", *_EXPERTS)
"""Settings for the calibration text and its use."""
_TUNING = ("tune_tokens", "tune_rate", "tune_codes", "tune_norms", "tune_own_text")
"""Settings of tuning besides its number of steps."""


def unused_settings(recipe: Recipe) -> list[str]:
    """One sentence for every reason why settings of ``recipe`` do nothing; values of its quality count as
    unchanged. What depends on the model is not known here."""
    rules = [recipe.rules] if recipe.quantize_head == UNQUANTIZED else [recipe.rules, recipe.head_rules]
    outcomes = [each for rule in rules for each in (rule.default, *(one.outcome for one in rule.ordered))]
    methods = {each.method for each in outcomes if isinstance(each, ModuleSettings)}
    sentences = []
    reads_text = recipe.tune_steps or recipe.wants_allocation or any(METHODS[m].calibrated for m in methods)
    if not reads_text and (idle := changed_settings(recipe, _TEXT)):
        sentences.append(_sentence(recipe, idle, f"method {' and '.join(sorted(methods))} reads no text"))
    if not recipe.tune_steps and (idle := changed_settings(recipe, _TUNING)):
        sentences.append(_sentence(recipe, idle, f"{spelled('tune_steps')} is 0"))
    if recipe.method not in methods and not recipe.wants_allocation:
        default = METHODS[recipe.method].options()
        names = [each.name for each in fields(default)]
        idle = [key for key in names if getattr(recipe.options, key) != _usual(recipe, key, default)]
        idle = [*changed_settings(recipe, ("method",)), *idle]
        if idle:
            sentences.append(
                _sentence(recipe, idle, f"these schemes are made by {' and '.join(sorted(methods))}")
            )
    return sentences


def changed_settings(recipe: Recipe, keys: tuple[str, ...]) -> list[str]:
    """Those of ``keys``, settings of a recipe, that have another value than the recipe's quality gives."""
    return [key for key in keys if getattr(recipe, key) != _usual(recipe, key, Recipe)]


def _usual(recipe: Recipe, key: str, defaults: object) -> object:
    return QUALITIES[recipe.quality].settings.get(key, getattr(defaults, key))


def _sentence(recipe: Recipe, keys: list[str], reason: str) -> str:
    named = [spelled(key, getattr(recipe, key, getattr(recipe.options, key, None))) for key in keys]
    return f"{', '.join(named)}: no effect, since {reason}"
