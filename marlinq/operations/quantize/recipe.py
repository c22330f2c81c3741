"""Recipe: the settings of a quantise run, as a value that can be read, written, compared and stored.

A YAML recipe file, the manifest of an output folder and ``--override`` use the same keys. The options of the
recipe's method are keys beside the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from marlinq.core.errors import UsageError
from marlinq.core.files import read_regular
from marlinq.core.granularity import Granularity
from marlinq.core.plain_values import MAX_YAML_BYTES, load_yaml
from marlinq.core.rules import Keep, ModuleRules, Rule
from marlinq.core.scheme import INT4
from marlinq.core.schemes import SCHEMES, NamedScheme
from marlinq.core.settings import (
    AUTO,
    NONE,
    Automatic,
    Bits,
    Bytes,
    Choice,
    Flag,
    Fraction,
    Text,
    Texts,
    Unset,
    WholeNumber,
    check_settings,
    kinds,
    setting,
)
from marlinq.core.sparsity import SPARSITIES, Sparsity
from marlinq.formats import FORMATS
from marlinq.methods import METHODS, MethodOptions, RTNOptions
from marlinq.operations.quantize.candidates import CANDIDATES, Members, read_allocation
from marlinq.operations.quantize.module_settings import ModuleSettings
from marlinq.operations.quantize.override import DENSE, SHARED, Override, override_of
from marlinq.operations.quantize.quality import DEFAULT, QUALITIES
from marlinq.operations.quantize.spelling import in_command, spelled

UNQUANTIZED = NONE
ROUNDING, STATIC_ROUNDING = "rtn", "rtn-static"
"""Methods for modules whose scheme the recipe's method can't make: for dynamic or 16-bit activations, and for
static ones."""
EXPERTS = ("routed", "all")
EXPERT_FALLBACKS = ("blend", "all", "shared")
NO_TEMPLATE = NONE
MIXED_FORMATS = ("compressed-tensors", "gptq", "gptq-v2")
"""Formats whose config can give each module a scheme of its own."""
SERVED_BY = ("vllm", "sglang", "transformers", "marlinq")
"""Values of ``--for``."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of a quantised checkpoint, besides the model and the machine.

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
        sparsity: name in :data:`marlinq.core.sparsity.SPARSITIES` of the pattern that integer linears are
            pruned to, or "none".
        quantize_head: scheme of the output head, or "none" to leave it unquantised. Its other settings are
            those of the other modules, or of an override that matches its name.
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

    quality: str = setting(
        DEFAULT,
        Choice(QUALITIES),
        "Named settings that trade time for quality: "
        + "; ".join(f"{quality.name}: {quality.meaning}" for quality in QUALITIES.values())
        + ".",
    )
    format: str = setting("gptq", Choice(FORMATS), "Output format.")
    method: str = setting("gptq", Choice(METHODS), "Method that quantises the weights.")
    scheme: str = setting(
        "int4",
        SHARED["scheme"],
        "Type and grouping of the stored weights: "
        + "; ".join(f"{each.name}: {each.meaning}" for each in SCHEMES.values())
        + ".",
    )
    group_size: int | str = setting(
        AUTO,
        SHARED["group_size"],
        "Input channels that share a scale. -1 is one scale per output channel; auto is the largest of 128, "
        "64 and 32 that divides the input channels of every quantised linear.",
    )
    symmetric: bool = setting(
        True,
        SHARED["symmetric"],
        "Fix zero points at the middle code, or choose and store one for each group.",
    )
    sparsity: str = setting(
        DENSE,
        SHARED["sparsity"],
        "Prune int4 and int8 linears: 2:4 keeps two of every four neighbouring input channels.",
    )
    quantize_head: str = setting(
        UNQUANTIZED,
        Choice(SCHEMES, UNQUANTIZED),
        "Quantise the output head with this scheme, even if it is tied to the embedding.",
    )
    target_bits: float | str = setting(
        NONE,
        Unset(Bits()),
        "Choose each module's scheme so that the model changes least while the decoder's linears take at "
        "most this many bits per weight on average, scales included.",
    )
    target_size: int | str = setting(
        NONE,
        Unset(Bytes()),
        "Choose each module's scheme so that the model changes least while all tensors take at most this "
        "many bytes, such as 6GB.",
    )
    served_by: str = setting(
        SERVED_BY[0],
        Choice(SERVED_BY),
        "Server or library whose loader must take the schemes that --target-bits or --target-size choose.",
    )
    calibration: str | tuple[str, ...] = setting("self", Texts(), "Text to calibrate on.")
    samples: int | str = setting(
        AUTO,
        Automatic(WholeNumber(1)),
        "Number of calibration documents; auto is 128, or as many as --tokens take.",
    )
    tokens: int | str = setting(
        AUTO,
        Automatic(WholeNumber(16)),
        "Largest number of tokens in all calibration documents; auto depends on the source of the text, the "
        "device and the method.",
    )
    max_length: int = setting(2048, WholeNumber(1), "Tokens that a document is cut to.")
    chat_template: str = setting(
        NO_TEMPLATE,
        Text(),
        "Calibrate on conversations: 'model' takes the model's chat template, a path the Jinja template in "
        "that file. Text becomes a user's message; the model itself writes a question and its answer.",
    )
    seed: int = setting(0, WholeNumber(0), "Seed of every random choice.")
    experts: str = setting(
        "routed",
        Choice(EXPERTS),
        "Calibrate an expert on the tokens routed to it, or on all tokens of its layer.",
    )
    expert_tokens: int = setting(
        256, WholeNumber(0), "Number of routed tokens below which an expert gets --expert-fallback."
    )
    expert_fallback: str = setting(
        "blend",
        Choice(EXPERT_FALLBACKS),
        "Inputs for an expert with too few tokens. blend: its own, filled up with those of the layer; all: "
        "those of the layer; shared: those of the layer for gate and up, of all its experts for down.",
    )
    tune_steps: int | str = setting(
        0,
        Automatic(WholeNumber(0)),
        "Steps of end-to-end tuning towards the original's predictions; 0 is no tuning, auto depends on "
        "model and device.",
    )
    tune_tokens: int | str = setting(
        AUTO,
        Automatic(WholeNumber(1)),
        "Tokens per step of tuning; auto is 8192, and fewer where auto steps are few.",
    )
    tune_rate: float | str = setting(
        AUTO,
        Automatic(Fraction()),
        "Largest relative change of a scale in a step of tuning; auto is 0.84 divided by the number of "
        "steps (up to 1,400), at most 0.002.",
    )
    tune_codes: bool = setting(False, Flag(), "Tune codes as well as scales.")
    tune_norms: bool = setting(
        True, Flag(), "Tune norms and biases too; they stay unquantised but differ from the original's."
    )
    tune_own_text: bool = setting(
        False,
        Flag(),
        "Also tune on text that the model writes, so that tuning does not overfit a few calibration "
        "documents.",
    )
    options: MethodOptions = field(default_factory=MethodOptions)
    allocation: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()

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
        self._check_scheme()
        self._check_target()
        for override in self.overrides:
            self._check_override(override)
        for rule in self.rules.ordered:
            self._check_outcome(rule.outcome)
        self._check_outcome(self.rules.default)
        outcomes = (self.rules.default, *(rule.outcome for rule in self.rules.ordered))
        asked = FORMATS[self.format].sparsity
        if asked is not None and not any(
            isinstance(each, ModuleSettings) and each.sparsity == asked for each in outcomes
        ):
            raise UsageError(
                f"{spelled('format')}: {self.format} is for {asked.describe()} weights; add "
                f"{spelled('sparsity')} {asked.name}, or choose another {spelled('format')}"
            )
        # Overrides of the head are checked later, when its name is known.
        self._check_outcome(self.head_rules.default)

    def _check_scheme(self) -> None:
        named = SCHEMES[self.scheme]
        if named.granularity is not None and self.group_size != AUTO:
            raise UsageError(
                f"{spelled('group_size')}: {named.name} has {named.granularity.describe()}; leave it out"
            )
        if named.element.table is not None and not self.symmetric:
            raise UsageError(f"{spelled('symmetric', False)}: {named.name} has no zero points; leave it out")
        if named.element.table is not None and self.sparsity != DENSE:
            raise UsageError(
                f"{spelled('sparsity')}: {named.name} weights are not pruned, only integers; leave it out"
            )

    def _check_target(self) -> None:
        object.__setattr__(self, "allocation", read_allocation(self.allocation))
        targets = [key for key in _TARGETS if getattr(self, key) != NONE]
        if not (targets or self.allocation):
            if self.served_by != SERVED_BY[0]:
                raise UsageError(
                    f"{spelled('served_by')}: {self.served_by} only goes with {spelled('target_bits')} or "
                    f"{spelled('target_size')}; leave it out"
                )
            return
        key = (targets or ["allocation"])[0]
        if len(targets) > 1:
            raise UsageError(f"{spelled(targets[1])}: {spelled(key)} is given too; keep one")
        if self.sparsity != DENSE:
            raise UsageError(
                f"{spelled('sparsity')}: what pruning costs is not measured, so it can't go with "
                f"{spelled(key)}; keep one"
            )
        for other in ("scheme", "group_size"):
            if getattr(self, other) != getattr(Recipe, other):
                raise UsageError(
                    f"{spelled(other)}: {spelled(key)} chooses the scheme of each module; leave it out, or "
                    "set it for some with --override, which wins"
                )
        if self.format not in MIXED_FORMATS:
            raise UsageError(
                f"{spelled(key)}: {self.format} does not hold schemes that differ between modules; expected "
                f"{spelled('format')} {' or '.join(MIXED_FORMATS[:2])}"
            )

    def _is_other_target(self, changes: Mapping[str, Any]) -> bool:
        """Whether ``changes`` ask for another allocation; one that was not chosen for a target stays."""
        wanted = any(changes.get(key, getattr(self, key)) != NONE for key in _TARGETS)
        return wanted and any(key in changes and changes[key] != getattr(self, key) for key in _ALLOCATED_FOR)

    @property
    def wants_allocation(self) -> bool:
        """Whether the recipe has a target for which schemes are not chosen yet."""
        return not self.allocation and any(getattr(self, key) != NONE for key in _TARGETS)

    def _check_override(self, override: Override) -> None:
        own = (*SHARED, *kinds(METHODS[self.method].options))
        for key in override.settings:
            if key not in own:
                raise UsageError(
                    f"override {override.pattern!r}: {key}: no option of method {self.method}; "
                    f"expected one of {', '.join(own)}"
                )

    def _check_outcome(self, outcome: ModuleSettings | Keep) -> None:
        if isinstance(outcome, Keep):
            return
        form, method, where = FORMATS[self.format], METHODS[outcome.method], _place(outcome)
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
                and each.sparsity in (None, scheme.sparsity)
                and each.scheme_refusal(scheme) is None
            )
            advice = (
                f"choose {spelled('format')} {holding}" if holding else f"choose another {spelled('scheme')}"
            )
            raise UsageError(f"{where}{form.name} can't hold {reason}; {advice}")
        sparse = form.sparsity is not None and scheme.sparsity is not None
        if sparse and (reason := form.layouts[0].scheme_refusal(scheme)) is not None:
            other = f"choose another {spelled('format')}"
            raise UsageError(f"{where}{form.name} can't hold {reason}; {other}")
        if (reason := method.scheme_refusal(scheme)) is not None:
            raise UsageError(f"{where}{self._method_refusal(method.name, reason)}")

    def _method_refusal(self, method: str, reason: str) -> str:
        """A sentence that says that ``method`` can't make a scheme, and what chose it."""
        if self.quality != DEFAULT and QUALITIES[self.quality].settings.get("method") == method:
            return (
                f"{method}, the method of {spelled('quality')} {self.quality}, can't make {reason}; choose "
                f"another {spelled('quality')}, or {spelled('method')}"
            )
        return f"{method} can't make {reason}; choose another {spelled('method')}"

    @cached_property
    def rules(self) -> ModuleRules[ModuleSettings]:
        """Settings of each module by its full dotted name, or why it stays unquantised."""
        chosen = tuple(
            Rule(Members(frozenset(members)), self.candidate_settings(name))
            for name, members in self.allocation.items()
        )
        rules = self._rules(self.scheme, _RECIPE)
        return ModuleRules(rules.default, (*rules.ordered, *chosen))

    def candidate_settings(self, name: str) -> ModuleSettings | Keep:
        """Settings of a module for which an allocation chose the candidate ``name``."""
        settings = CANDIDATES[name].settings
        if settings is None:
            return Keep("allocation leaves it unquantised")
        return self._settings(settings, self.scheme, "allocation")

    @cached_property
    def head_rules(self) -> ModuleRules[ModuleSettings]:
        """Settings of the output head by its full dotted name, or why it stays unquantised."""
        if self.quantize_head == UNQUANTIZED:
            return ModuleRules(Keep("output head: its error reaches every logit directly"))
        return self._rules(self.quantize_head, f"quantize_head {self.quantize_head}")

    def _rules(self, scheme: str, reason: str) -> ModuleRules[ModuleSettings]:
        return ModuleRules(
            self._settings({}, scheme, reason),
            tuple(
                Rule(
                    override,
                    Keep(f"override {override.pattern!r} skips it")
                    if override.skip
                    else self._settings(override.settings, scheme, f"override {override.pattern!r}"),
                )
                for override in self.overrides
            ),
        )

    def _settings(self, changes: Mapping[str, Any], scheme: str, reason: str) -> ModuleSettings:
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
            sparsity=self._sparsity(changes, named),
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

    def _sparsity(self, changes: Mapping[str, Any], named: NamedScheme) -> Sparsity | None:
        """The sparsity after ``changes``; the recipe's own does not apply to float elements."""
        if named.element.table is not None and "sparsity" not in changes:
            return None
        return SPARSITIES.get(changes.get("sparsity", self.sparsity))

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
        given = [key for key in _TARGETS if changes.get(key, NONE) != NONE]
        return {key: NONE for key in _TARGETS if len(given) == 1} | dict(changes)


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


def _place(outcome: ModuleSettings) -> str:
    """The beginning of a message about the settings of some modules."""
    if outcome.reason == _RECIPE and in_command():
        return ""
    key, _, value = outcome.reason.partition(" ")
    return f"{spelled(key)} {value}: " if key == "quantize_head" else f"{outcome.reason}: "


_RECIPE = "recipe"
_GIVEN = "_given"
"""Attribute of a recipe under construction: names of the settings that its maker gave."""
_TARGETS = ("target_bits", "target_size")
_ALLOCATED_FOR = (*_TARGETS, "served_by", "format")
