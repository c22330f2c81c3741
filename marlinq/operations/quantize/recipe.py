"""Recipe: the settings of a quantise run, as a value that can be read, written, compared and stored.

A YAML recipe file, the manifest of an output folder and ``--override`` use the same keys. The options of the
recipe's method are keys beside the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from marlinq.core.errors import UsageError
from marlinq.core.files import read_regular
from marlinq.core.granularity import Granularity
from marlinq.core.plain_values import MAX_YAML_BYTES, load_yaml
from marlinq.core.rules import Keep, ModuleRules, Rule
from marlinq.core.scheme import INT4
from marlinq.core.schemes import SCHEMES
from marlinq.core.settings import AUTO, NONE, check_settings, kinds
from marlinq.core.sparsity import SPARSITIES
from marlinq.methods import METHODS, MethodOptions, RTNOptions
from marlinq.operations.quantize.candidates import CANDIDATES, Members, read_allocation
from marlinq.operations.quantize.module_settings import ModuleSettings
from marlinq.operations.quantize.override import DENSE, SHARED, Override, override_of
from marlinq.operations.quantize.quality import QUALITIES
from marlinq.operations.quantize.recipe_checks import (
    FROM_RECIPE,
    check_outcome,
    check_overrides,
    check_rules,
    check_scheme,
    check_target,
)
from marlinq.operations.quantize.recipe_settings import TARGETS, UNQUANTIZED, RecipeSettings
from marlinq.operations.quantize.spelling import spelled

ROUNDING, STATIC_ROUNDING = "rtn", "rtn-static"
"""Methods for modules whose scheme the recipe's method can't make: for dynamic or 16-bit activations, and for
static ones."""
_GIVEN = "_given"
"""Attribute of a recipe under construction: names of the settings that its maker gave."""
_ALLOCATED_FOR = (*TARGETS, "served_by", "format")
"""Settings that decide which schemes are chosen for the modules."""


@dataclass(frozen=True)
class Recipe(RecipeSettings):
    """Everything that decides the bytes of a quantised checkpoint, besides the model and the machine.

    Fields are in ``recipe_settings.py``, what is refused in ``recipe_checks.py``.

    Attributes:
        quality: name in :data:`marlinq.operations.quantize.quality.QUALITIES`, which gives the defaults of
            some of the settings below. The constructor, :meth:`from_dict` and :meth:`replace` apply it before
            the settings that are given with it.
        format: output format, a name in :data:`marlinq.formats.FORMATS`.
        method: name in :data:`marlinq.methods.METHODS`.
        scheme: name in :data:`marlinq.core.schemes.SCHEMES`.
        group_size: input channels per scale for int4 and int8: 32, 64 or 128; -1 for one scale per output
            channel; "auto" for the largest of 128, 64 and 32 that divides every quantised module's K.
        symmetric: whether zero points are fixed at the middle code.
        sparsity: name in :data:`marlinq.core.sparsity.SPARSITIES` of the pattern that the decoder's integer
            linears are pruned to, or "none".
        quantize_head: scheme of the output head, or "none" to leave it unquantised. Its other settings are
            those of the other modules, or of an override that matches its name; only such an override prunes
            it.
        target_bits: largest mean bits per weight of the decoder's linears, stored scales included, for which
            each module's scheme is chosen (:mod:`marlinq.operations.quantize.allocation`); or "none".
        target_size: largest bytes of all output tensors for which each module's scheme is chosen; or "none".
        served_by: server whose loader must take the chosen schemes.
        calibration: "self", a file, or the name of a dataset; or several of them, each optionally followed by
            ``=WEIGHT``. Unused by a method without calibration.
        samples: number of calibration documents; "auto" is 128, or with ``tokens`` as many as these take.
        tokens: largest number of tokens in all calibration documents. "auto" is no limit for files and
            datasets, and an amount that suits the device for text that the model writes
            (:mod:`marlinq.operations.quantize.budget`). Without tuning, "auto" is never more than the
            method's :attr:`~marlinq.methods.Method.enough_tokens`.
        max_length: tokens that a document is cut to.
        chat_template: "model" puts every text into the model's chat template, as a user's message, and lets
            the model write conversations; a path does so with the template in that file; "none" leaves text
            as it is.
        seed: seed of all random choices, in the calibration text and in the order of tuning.
        experts: "routed" calibrates experts on the tokens routed to them, "all" on all tokens of their layer.
        expert_tokens: number of routed tokens below which an expert gets the fallback.
        expert_fallback: inputs for an expert with too few tokens. ``blend``: its own, and all inputs of the
            layer in the place of the missing tokens. ``all``: all inputs of the layer. ``shared``: all inputs
            of the layer for gate and up, the inputs of all experts together for down.
        tune_steps, tune_tokens, tune_rate: steps, tokens per step and largest change of end-to-end tuning
            (:mod:`marlinq.operations.quantize.tuning`); "auto" follows a budget
            (:mod:`marlinq.operations.quantize.budget`).
        tune_codes, tune_norms: whether tuning changes codes, and norms and biases, besides scales.
        tune_own_text: whether tuning also learns from text that the model writes.
        options: options of the method; a plain ``MethodOptions()`` becomes the method's defaults. In files,
            their keys are beside the recipe's own.
        allocation: candidate (:data:`marlinq.operations.quantize.candidates.CANDIDATES`) -> modules that it
            was chosen for; empty until schemes are chosen. Overrides win over it.
        overrides: rules for single modules; the first whose pattern matches a module's name applies.

    Raises:
        UsageError: a value is of the wrong type or out of range, or format or method don't support it.
    """

    def __new__(cls, *args: Any, **settings: Any) -> Recipe:
        """Names a setting that does not exist, and those that do, instead of a bare TypeError.

        Raises:
            UsageError: a keyword is no setting.
        """
        known = [each.name for each in fields(cls)]
        for key in settings:
            if key not in known:
                raise UsageError(
                    f"Recipe: unknown setting {key!r}; expected one of {', '.join(known)}; options of the "
                    "method are keys of a dict or file"
                )
        recipe = super().__new__(cls)
        object.__setattr__(recipe, _GIVEN, frozenset((*known[: len(args)], *settings)))
        return recipe

    def __post_init__(self) -> None:
        given = self.__dict__.pop(_GIVEN)
        check_settings(self)
        named = QUALITIES[self.quality].settings if "quality" in given else {}
        for key in named.keys() & {each.name for each in fields(self)} - given:
            object.__setattr__(self, key, named[key])
        wanted = METHODS[self.method].options
        if type(self.options) is MethodOptions:
            options = {each.name: named[each.name] for each in fields(wanted) if each.name in named}
            object.__setattr__(self, "options", wanted(**options))
        if type(self.options) is not wanted:
            raise UsageError(
                f"method {self.method}: expected {wanted.__name__}, found {type(self.options).__name__}"
            )
        check_scheme(self)
        object.__setattr__(self, "allocation", read_allocation(self.allocation))
        check_target(self)
        check_overrides(self)
        check_rules(self, self.rules)
        # Overrides of the head are checked later, when its name is known.
        check_outcome(self, self.head_rules.default)

    def _is_other_target(self, changes: Mapping[str, Any]) -> bool:
        """Whether ``changes`` ask for another allocation; one that was not chosen for a target stays."""
        wanted = any(changes.get(key, getattr(self, key)) != NONE for key in TARGETS)
        return wanted and any(key in changes and changes[key] != getattr(self, key) for key in _ALLOCATED_FOR)

    @property
    def wants_allocation(self) -> bool:
        """Whether the recipe has a target for which schemes are not chosen yet."""
        return not self.allocation and any(getattr(self, key) != NONE for key in TARGETS)

    @cached_property
    def rules(self) -> ModuleRules[ModuleSettings]:
        """Settings of each module by its full dotted name, or why it stays unquantised."""
        chosen = tuple(
            Rule(Members(frozenset(members)), self.candidate_settings(name))
            for name, members in self.allocation.items()
        )
        rules = self._rules(self.scheme, FROM_RECIPE, self.sparsity)
        return ModuleRules(rules.default, (*rules.ordered, *chosen))

    def candidate_settings(self, name: str) -> ModuleSettings | Keep:
        """Settings of a module for which an allocation chose the candidate ``name``."""
        settings = CANDIDATES[name].settings
        if settings is None:
            return Keep("allocation leaves it unquantised")
        return self._settings(settings, self.scheme, "allocation", self.sparsity)

    @cached_property
    def head_rules(self) -> ModuleRules[ModuleSettings]:
        """Settings of the output head by its full dotted name, or why it stays unquantised."""
        if self.quantize_head == UNQUANTIZED:
            return ModuleRules(Keep("output head: its error reaches every logit directly"))
        return self._rules(self.quantize_head, f"quantize_head {self.quantize_head}", DENSE)

    def _rules(self, scheme: str, reason: str, sparsity: str) -> ModuleRules[ModuleSettings]:
        return ModuleRules(
            self._settings({}, scheme, reason, sparsity),
            tuple(
                Rule(
                    override,
                    Keep(f"override {override.pattern!r} skips it")
                    if override.skip
                    else self._settings(
                        override.settings, scheme, f"override {override.pattern!r}", sparsity
                    ),
                )
                for override in self.overrides
            ),
        )

    def _settings(
        self, changes: Mapping[str, Any], scheme: str, reason: str, sparsity: str
    ) -> ModuleSettings:
        own = {key: value for key, value in changes.items() if key not in SHARED}
        named = SCHEMES[changes.get("scheme", scheme)]
        size, symmetric = (changes.get(key, getattr(self, key)) for key in ("group_size", "symmetric"))
        if named.granularity is not None and "group_size" in changes:
            raise UsageError(f"{reason}: group_size: {named.name} has {named.granularity.describe()}")
        granularity = named.granularity
        if granularity is None and size != AUTO:
            granularity = Granularity.from_group_size(size)
        settings = ModuleSettings(
            element=named.element,
            granularity=granularity,
            # Float elements have no zero points, so ``symmetric: false`` of the recipe is not meant for them.
            symmetric=symmetric or (named.element.table is not None and "symmetric" not in changes),
            scale_dtype=named.scale_dtype,
            two_levels=named.two_levels,
            activations=named.activations,
            # A sparsity of the whole recipe is not meant for float elements.
            sparsity=SPARSITIES.get(
                changes.get("sparsity", sparsity if named.element.table is None else DENSE)
            ),
            method=self.method,
            options=replace(self.options, **own),
            reason=reason,
        )
        method, typical = METHODS[self.method], settings.typical
        makes = method.scheme_refusal(typical) is None and method.takes_unasked(typical)
        if named.element.table is None or own or makes:
            return settings
        static = named.activations is not None and not named.activations.dynamic
        rounding = STATIC_ROUNDING if static else ROUNDING
        # With few code values, a scale that clips the largest weights is usually better.
        options = RTNOptions(clip_search=named.element.bits == INT4.bits)
        return replace(settings, method=rounding, options=options)

    def names_module(self, module: str) -> bool:
        """Whether the override that applies to ``module`` needs the last part of its name to match.

        Only such an override quantises a module that stays in 16 bits by default; one that matches the
        module's parent alone does not.
        """
        decides = next((each for each in self.overrides if each.matches(module)), None)
        return decides is not None and not decides.matches(module[: module.rfind(".") + 1])

    def unused_overrides(self, modules: Iterable[str]) -> tuple[Override, ...]:
        """The overrides that apply to none of ``modules``, usually because a pattern is mistyped."""
        used = set()
        for module in modules:
            used.add(next((i for i, o in enumerate(self.overrides) if o.matches(module)), None))
        return tuple(o for i, o in enumerate(self.overrides) if i not in used)

    def to_dict(self) -> dict[str, Any]:
        """A plain mapping for YAML and JSON; ``from_dict`` gives back an equal recipe."""
        own = {key: getattr(self, key) for key in kinds(Recipe)}
        overrides = [override.to_dict() for override in self.overrides]
        chosen = {name: list(members) for name, members in self.allocation.items()}
        return own | asdict(self.options) | {"allocation": chosen, "overrides": overrides}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe of a mapping; absent keys keep their defaults.

        Raises:
            UsageError: an unknown key, or a value of the wrong type or out of range.
        """
        rules = values.get("overrides", [])
        if not isinstance(rules, list):
            raise UsageError(f"recipe: overrides: expected a list of rules, found {rules!r}")
        changes = dict(values) | {"overrides": tuple(override_of(rule) for rule in rules)}
        return cls._changed(None, changes)

    def quality_record(self) -> dict[str, Any]:
        """Name and version of the quality, and the keys of its settings that this recipe changes. Options
        that the recipe's method does not have don't count as changed."""
        quality = QUALITIES[self.quality]
        own = self.to_dict()
        changed = sorted(key for key, value in quality.settings.items() if key in own and own[key] != value)
        return {"name": quality.name, "version": quality.version, "changed": changed}

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some settings changed, the method's options among them, checked again.

        Another method begins with its own default options.

        Raises:
            UsageError: as for a new recipe, or a key is neither a recipe's nor an option of its method.
        """
        return self._changed(self, changes)

    @classmethod
    def _changed(cls, recipe: Recipe | None, changes: Mapping[str, Any]) -> Recipe:
        named: Mapping[str, Any] = {}
        if "quality" in changes:
            kinds(cls)["quality"].check("quality", changes["quality"])
            named = QUALITIES[changes["quality"]].settings
        own = [f.name for f in fields(cls) if f.name != "options"]
        method = {**named, **changes}.get("method", recipe.method if recipe else Recipe.method)
        kinds(cls)["method"].check("method", method)
        options = METHODS[method].options
        names = [f.name for f in fields(options)]
        # A quality's options of its own method are dropped where the recipe names another method.
        known = (*own, *names)
        changes = {**{key: value for key, value in named.items() if key in known}, **changes}
        for key in changes:
            if key not in known:
                others = [name for name, other in METHODS.items() if key in kinds(other.options)]
                if others:
                    raise UsageError(
                        f"{spelled(key, changes[key])}: no option of method {method}, but of "
                        f"{' and '.join(others)}; leave it out, or choose another {spelled('method')}"
                    )
                raise UsageError(
                    f"recipe: unknown key {key!r}; expected one of {', '.join(known)} with method {method}"
                )
        changes = cls._one_target(changes)
        kept = recipe.options if recipe and recipe.method == method else options()
        chosen = {key: value for key, value in changes.items() if key in names}
        if recipe is not None and recipe.allocation and recipe._is_other_target(changes):
            # The allocation was chosen for another target, loader or format, so it is dropped.
            changes = {"allocation": {}, **changes}
        # YAML and JSON write tuples as lists.
        rest: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in changes.items()
            if key in own
        }
        rest["options"] = replace(kept, **chosen)
        return replace(recipe, **rest) if recipe else cls(**rest)

    @classmethod
    def _one_target(cls, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """``changes`` with a size as a number of bytes, and without the target that a new one replaces."""
        size = changes.get("target_size")
        if isinstance(size, str):
            changes = {**changes, "target_size": kinds(cls)["target_size"].parse("target_size", size)}
        given = [key for key in TARGETS if changes.get(key, NONE) != NONE]
        return {key: NONE for key in TARGETS if len(given) == 1} | dict(changes)


def as_recipe(value: Recipe | Mapping[str, Any] | None) -> Recipe:
    """The recipe that ``value`` is or describes: a recipe, a mapping of its settings, or None for defaults.

    Raises:
        UsageError: ``value`` is of another type, or :meth:`Recipe.from_dict` refuses it.
    """
    if value is None or isinstance(value, Recipe):
        return value or Recipe()
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    raise UsageError(
        f"recipe: expected a marlinq.Recipe or a dict of its settings, found {type(value).__name__}; "
        "marlinq.read_recipe(path) reads a YAML file"
    )


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Reads a YAML recipe; absent keys keep their defaults.

    Raises:
        UsageError: the file can't be read, is not a YAML mapping, or holds an unknown key or bad value.
    """
    return read_recipe_file(path)[0]


def read_recipe_file(path: str | os.PathLike[str]) -> tuple[Recipe, frozenset[str]]:
    """As :func:`read_recipe`; returns the recipe and the keys that the file gives."""
    path = Path(path)
    try:
        values = load_yaml(read_regular(path, MAX_YAML_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: can't read the recipe: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not a YAML recipe: {str(error)[:300]}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected a mapping of recipe keys, found {type(values).__name__}")
    try:
        return Recipe.from_dict(values), frozenset(map(str, values))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
