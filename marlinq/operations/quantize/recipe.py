"""What a quantise run was asked to do: a value that can be read, written, compared and stored.

The same keys are used by a YAML recipe file, by the manifest of an output folder and by ``--override``. The
options of the recipe's method stand among the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from marlinq.core.errors import UsageError
from marlinq.core.files import read_regular
from marlinq.core.granularity import Granularity
from marlinq.core.patterns import MAX_CHARACTERS, Pattern, Patterns
from marlinq.core.plain_values import MAX_YAML_BYTES, load_yaml
from marlinq.core.rules import Keep, ModuleRules, Rule
from marlinq.core.scheme import INT4, Activations, Element, Scheme
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
    Kind,
    Text,
    Texts,
    Unset,
    WholeNumber,
    check_settings,
    kinds,
    setting,
)
from marlinq.core.sparsity import SPARSITIES, Sparsity
from marlinq.formats import FORMATS, Format, Layout
from marlinq.methods import METHODS, MethodOptions, RTNOptions
from marlinq.operations.quantize.candidates import CANDIDATES, Members, read_allocation
from marlinq.operations.quantize.quality import DEFAULT, QUALITIES

AUTO_GROUP_SIZES = (128, 64, 32)
GROUP_SIZES = (32, 64, 128, -1, AUTO)
UNQUANTIZED = NONE
DENSE = NONE
"""The sparsity of weights that are not pruned."""
ROUNDING, STATIC_ROUNDING = "rtn", "rtn-static"
"""The methods of modules whose scheme the recipe's method can't make: without and with static activations."""
EXPERTS = ("routed", "all")
EXPERT_FALLBACKS = ("blend", "all", "shared")
NO_TEMPLATE = NONE
MIXED_FORMATS = ("compressed-tensors", "gptq", "gptq-v2")
"""The formats whose configs hold what an allocation chooses."""
SERVED_BY = ("vllm", "sglang", "transformers", "marlinq")
"""What ``--for`` may name."""


@dataclass(frozen=True)
class ModuleSettings:
    """How one module is quantised.

    Attributes:
        element: the type of its codes.
        granularity: weights that share a scale; None for groups of a size that is decided for all modules
            together, then stored.
        symmetric: zero points in the middle of the codes.
        scale_dtype: name of the scales' dtype; None where layout or model decide.
        two_levels: scales are multiplied by one more scale per tensor.
        activations: how servers quantise the inputs; None for 16-bit activations.
        sparsity: pattern of pruned weights; None where none are.
        method: name of the method that makes it.
        options: options of that method.
        reason: where the settings come from.
    """

    element: Element
    granularity: Granularity | None
    symmetric: bool
    scale_dtype: str | None
    two_levels: bool
    activations: Activations | None
    sparsity: Sparsity | None
    method: str
    options: MethodOptions
    reason: str

    def layout(self, form: Format) -> Layout:
        """The layout of ``form`` that holds it.

        Raises:
            ConversionRefused: none does.
        """
        return form.layout_of(self.typical)

    @property
    def typical(self) -> Scheme:
        """The scheme of a module of any K that has groups: what formats and methods are asked about."""
        granularity = self.granularity or Granularity.group(AUTO_GROUP_SIZES[0])
        return replace(self, granularity=granularity).scheme(2 * AUTO_GROUP_SIZES[0], "float16")

    def scheme(self, in_features: int, scale_dtype: str) -> Scheme:
        """The scheme of a module of K = ``in_features``; ``scale_dtype`` is for settings that have none.

        Raises:
            ValueError: the granularity is not decided yet.
        """
        if self.granularity is None:
            raise ValueError("an automatic group size is decided for all modules together, then stored")
        return Scheme(
            element=self.element,
            granularity=self.granularity.for_channels(in_features),
            zero_point=self.element.zero_point if self.symmetric else "stored",
            scale_dtype=self.scale_dtype or scale_dtype,
            tensor_scale="multiplies" if self.two_levels else "none",
            activations=self.activations,
            sparsity=self.sparsity,
        )

    def group_refusal(self, in_features: int) -> str | None:
        """Why a module of K = ``in_features`` can't have these groups, or None."""
        fitting = common_group_size([in_features])
        if self.granularity is None:
            if fitting is None:
                sizes = ", ".join(map(str, AUTO_GROUP_SIZES))
                return f"none of the group sizes {sizes} divides in_features {in_features}"
        elif self.granularity.kind == "group" and in_features % self.granularity.channels:
            hint = f", but of {fitting}" if fitting else ""
            size = self.granularity.channels
            return f"in_features {in_features} is not a multiple of group size {size}{hint}"
        if self.sparsity is not None and in_features % self.sparsity.span:
            return (
                f"in_features {in_features} is not a multiple of {self.sparsity.span} ({self.sparsity.name})"
            )
        return None


@dataclass(frozen=True)
class Override:
    """One rule for the modules whose full name ``pattern`` is found in.

    The pattern is a regular expression, case-sensitive and found anywhere in the name (as ``re.search``
    does): ``down_proj`` matches every down projection, ``^model\\.layers\\.0\\.`` the first block.
    ``settings`` is empty when ``skip`` is true; otherwise it holds at least one of the keys scheme,
    group_size, symmetric, sparsity and the options of the recipe's method.
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
        """Whether the rule is about ``module``.

        Raises:
            UsageError: the pattern takes too long.
        """
        return self._compiled.found_in(module)

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read the command line's ``REGEX=skip`` or ``REGEX=key=value[,key=value...]``.

        The keys are those of a recipe, with ``sym`` short for ``symmetric``. The regular expression may
        itself contain ``=``: the settings are the longest tail that reads as such.

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


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the bytes of a quantised checkpoint, besides the model and the machine.

    Attributes:
        quality: a name in :data:`marlinq.operations.quantize.quality.QUALITIES`, where some of the settings
            below come from. :meth:`from_dict` and :meth:`replace` apply it before the settings beside it.
        format: output format, a name in :data:`marlinq.formats.FORMATS`.
        method: a name in :data:`marlinq.methods.METHODS`.
        scheme: a name in :data:`marlinq.core.schemes.SCHEMES`.
        group_size: input channels a scale of int4 and int8, one of 32, 64, 128; -1 for one scale an output
            channel; or "auto" for the largest of 128, 64 and 32 that divides every quantised module's K, one
            size for all.
        symmetric: zero point fixed in the middle of the codes.
        sparsity: a name in :data:`marlinq.core.sparsity.SPARSITIES`, which linears of integers are pruned
            to, or "none".
        quantize_head: scheme of the output head, or "none" to leave it alone; group size, symmetry, sparsity
            and the options of the method are those of the other modules, or of an override that its name
            matches.
        target_bits: mean bits of a weight of the decoder's linears, stored scales included, within which
            schemes are chosen per module (:mod:`marlinq.operations.quantize.allocation`); or "none".
        target_size: bytes of all tensors of the output, within which they are; or "none".
        served_by: whose loader has to take what is chosen.
        calibration: "self", a file, or the name of a dataset; or several of them, each with ``=WEIGHT``
            behind it or not. Of no use to a method without calibration.
        samples: calibration documents; "auto" is 128, or with ``tokens`` as many as they take.
        tokens: number of tokens of all calibration documents together, at most; "auto" is no bound for text
            from outside, and what suits the device for text that the model writes
            (:mod:`marlinq.operations.quantize.budget`), unless ``samples`` is given; either way no more than
            the method's :attr:`~marlinq.methods.Method.enough_tokens`, unless there is tuning.
        max_length: tokens that a document is cut to.
        chat_template: "model" puts every text into the model's chat template, as a user's message, and lets
            the model write conversations; a file holds another template; "none" leaves text as it is.
        seed: seed of the calibration's random choices, and of the order in which tuning sees the text.
        experts: fused experts are calibrated on the tokens that are routed to them, or on all tokens.
        expert_tokens: an expert with fewer routed tokens gets the fallback.
        expert_fallback: ``blend``, its own inputs, weighted by how many of the tokens it has, with all inputs
            of the layer; ``all``, those alone; ``shared``, those for gate and up, and for down what all
            experts of the layer are given.
        tune_steps, tune_tokens, tune_rate, tune_codes, tune_norms, tune_own_text: how the quantised model is
            tuned end to end (:mod:`marlinq.operations.quantize.tuning`), and whether text that the model
            writes is learnt from beside a calibration from outside. Automatic steps, tokens and rates follow
            a budget (:mod:`marlinq.operations.quantize.budget`).
        options: options of the method; a plain ``MethodOptions()`` becomes its defaults. In files, their keys
            stand among the recipe's own.
        allocation: modules by the name of the candidate that was chosen for them
            (:data:`marlinq.operations.quantize.candidates.CANDIDATES`), where no override is about them;
            empty until it is chosen.
        overrides: the first rule whose pattern is found in a module's name decides what differs there.

    Raises:
        UsageError: a value is of the wrong type or out of range, or the format or the method can't do what is
            asked.
    """

    quality: str = setting(
        DEFAULT,
        Choice(QUALITIES),
        "How much is done for quality, as settings by name: "
        + "; ".join(f"{quality.name}: {quality.meaning}" for quality in QUALITIES.values())
        + ".",
    )
    format: str = setting("gptq", Choice(FORMATS), "Output format.")
    method: str = setting("gptq", Choice(METHODS), "How weights are quantised.")
    scheme: str = setting(
        "int4",
        Choice(SCHEMES),
        "How weights are stored: "
        + "; ".join(f"{each.name}: {each.meaning}" for each in SCHEMES.values())
        + ".",
    )
    group_size: int | str = setting(
        AUTO,
        Choice(GROUP_SIZES),
        "Input channels that share a scale; -1 is one scale an output channel, auto the largest of 128, 64 "
        "and 32 that divides the input channels of every quantised linear.",
    )
    symmetric: bool = setting(True, Flag(), "Zero point in the middle, or stored for each group.")
    sparsity: str = setting(
        DENSE,
        Choice(SPARSITIES, DENSE),
        "Prune linears of integers: 2:4 keeps two of every four neighbouring input channels.",
    )
    quantize_head: str = setting(
        UNQUANTIZED,
        Choice(SCHEMES, UNQUANTIZED),
        "Quantise the output head too, also one that is tied to the embedding: its scheme.",
    )
    target_bits: float | str = setting(
        NONE,
        Unset(Bits()),
        "Choose each module's scheme so that the model loses least at so many bits per weight of the "
        "decoder's linears on average, scales included.",
    )
    target_size: int | str = setting(
        NONE, Unset(Bytes()), "The same at so many bytes of all tensors together, such as 6GB."
    )
    served_by: str = setting(
        SERVED_BY[0], Choice(SERVED_BY), "Whose loader has to take the schemes that are chosen."
    )
    calibration: str | tuple[str, ...] = setting("self", Texts(), "Text to calibrate on.")
    samples: int | str = setting(
        AUTO, Automatic(WholeNumber(1)), "Calibration documents; auto is 128, or as many as --tokens take."
    )
    tokens: int | str = setting(
        AUTO,
        Automatic(WholeNumber(16)),
        "Tokens of all calibration documents together; auto is no bound for text from outside, and what "
        "suits the device for text that the model writes, but no more than are enough for the method.",
    )
    max_length: int = setting(2048, WholeNumber(1), "Tokens a document is cut to.")
    chat_template: str = setting(
        NO_TEMPLATE,
        Text(),
        "Calibrate on conversations: model for its own chat template, or a file with one. Text becomes a "
        "user's message, and what the model writes itself a question and its answer.",
    )
    seed: int = setting(0, WholeNumber(0), "Seed of every random choice.")
    experts: str = setting(
        "routed",
        Choice(EXPERTS),
        "Calibrate an expert on the tokens that are routed to it, or on all tokens of its layer.",
    )
    expert_tokens: int = setting(
        256, WholeNumber(0), "Routed tokens that an expert needs; with fewer it gets --expert-fallback."
    )
    expert_fallback: str = setting(
        "blend",
        Choice(EXPERT_FALLBACKS),
        "What an expert with too few tokens is calibrated on: its own blended with all tokens of the layer, "
        "all of them, or what the layer's experts share.",
    )
    tune_steps: int | str = setting(
        0,
        Automatic(WholeNumber(0)),
        "Steps of end-to-end tuning towards the original's predictions; 0 leaves it out, auto is what a "
        "budget of compute allows.",
    )
    tune_tokens: int | str = setting(
        AUTO,
        Automatic(WholeNumber(1)),
        "Tokens of a tuning step; auto is what the same budget allows, and 8192 beside a number of steps.",
    )
    tune_rate: float | str = setting(
        AUTO,
        Automatic(Fraction()),
        "Highest relative change of a scale in a tuning step; auto is 0.84 shared among the steps, at most "
        "0.002, and beyond 1,400 steps falls with the root of their number.",
    )
    tune_codes: bool = setting(False, Flag(), "Tune the codes too, not the scales alone.")
    tune_norms: bool = setting(
        True, Flag(), "Tune norms and biases too, which stay unquantised and differ from the original's then."
    )
    tune_own_text: bool = setting(
        False,
        Flag(),
        "Tune on text that the model writes, too, where the calibration comes from outside: a few documents "
        "are soon learnt by heart.",
    )
    options: MethodOptions = field(default_factory=MethodOptions)
    allocation: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        check_settings(self)
        wanted = METHODS[self.method].options
        if type(self.options) is MethodOptions:
            object.__setattr__(self, "options", wanted())
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
                f"format: {self.format} is for {asked.describe()} weights; add --sparsity {asked.name}, or "
                "choose another --format"
            )
        # Which overrides are about the head is known with its name.
        self._check_outcome(self.head_rules.default)

    def _check_scheme(self) -> None:
        named = SCHEMES[self.scheme]
        if named.granularity is not None and self.group_size != AUTO:
            raise UsageError(f"group_size: {named.name} has {named.granularity.describe()}; leave it out")
        if named.element.table is not None and not self.symmetric:
            raise UsageError(f"symmetric: {named.name} has no zero points; leave it out")
        if named.element.table is not None and self.sparsity != DENSE:
            raise UsageError(f"sparsity: {named.name} weights are not pruned, only integers; leave it out")

    def _check_target(self) -> None:
        object.__setattr__(self, "allocation", read_allocation(self.allocation))
        targets = [key for key in _TARGETS if getattr(self, key) != NONE]
        if not (targets or self.allocation):
            return
        key = (targets or ["allocation"])[0]
        if len(targets) > 1:
            raise UsageError(f"{targets[1]}: {key} is given too; keep one")
        if self.sparsity != DENSE:
            raise UsageError(
                f"sparsity: what pruning costs is not measured, so it can't go with {key}; keep one"
            )
        for other in ("scheme", "group_size"):
            if getattr(self, other) != getattr(Recipe, other):
                raise UsageError(
                    f"{other}: {key} chooses the scheme of each module; leave it out, or set it for some "
                    "with --override, which wins"
                )
        if self.format not in MIXED_FORMATS:
            raise UsageError(
                f"{key}: {self.format} does not hold schemes that differ between modules; expected --format "
                f"{' or '.join(MIXED_FORMATS[:2])}"
            )

    def _is_other_target(self, changes: Mapping[str, Any]) -> bool:
        """Whether ``changes`` ask for another allocation; one that was not chosen for a target stays."""
        wanted = any(changes.get(key, getattr(self, key)) != NONE for key in _TARGETS)
        return wanted and any(key in changes and changes[key] != getattr(self, key) for key in _ALLOCATED_FOR)

    @property
    def wants_allocation(self) -> bool:
        """Whether schemes have still to be chosen."""
        return not self.allocation and any(getattr(self, key) != NONE for key in _TARGETS)

    def _check_override(self, override: Override) -> None:
        own = (*_SHARED, *kinds(METHODS[self.method].options))
        for key in override.settings:
            if key not in own:
                raise UsageError(
                    f"override {override.pattern!r}: {key}: no option of method {self.method}; "
                    f"expected one of {', '.join(own)}"
                )

    def _check_outcome(self, outcome: ModuleSettings | Keep) -> None:
        if isinstance(outcome, Keep):
            return
        form, method = FORMATS[self.format], METHODS[outcome.method]
        if form.read_only is not None:
            raise UsageError(f"{outcome.reason}: {form.name} is read and never written: {form.read_only}")
        scheme = outcome.typical
        if scheme.sparsity is not None and scheme.element.table is not None:
            raise UsageError(f"{outcome.reason}: sparsity: {scheme.element.name} weights are not pruned")
        if (reason := form.scheme_refusal(scheme)) is not None:
            raise UsageError(f"{outcome.reason}: {form.name} can't hold {reason}; choose another --format")
        sparse = form.sparsity is not None and scheme.sparsity is not None
        if sparse and (reason := form.layouts[0].scheme_refusal(scheme)) is not None:
            raise UsageError(f"{outcome.reason}: {form.name} can't hold {reason}; choose another --format")
        if (reason := method.scheme_refusal(scheme)) is not None:
            raise UsageError(f"{outcome.reason}: {method.name} can't make {reason}; choose another --method")

    @cached_property
    def rules(self) -> ModuleRules[ModuleSettings]:
        """How each module is quantised, by its full dotted name, or why not."""
        chosen = tuple(
            Rule(Members(frozenset(members)), self.candidate_settings(name))
            for name, members in self.allocation.items()
        )
        rules = self._rules(self.scheme, "recipe")
        return ModuleRules(rules.default, (*rules.ordered, *chosen))

    def candidate_settings(self, name: str) -> ModuleSettings | Keep:
        """How a module is quantised that an allocation gives the candidate ``name``."""
        settings = CANDIDATES[name].settings
        if settings is None:
            return Keep("allocation leaves it unquantised")
        return self._settings(settings, self.scheme, "allocation")

    @cached_property
    def head_rules(self) -> ModuleRules[ModuleSettings]:
        """How the output head is quantised, by its full dotted name, or why not."""
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
        own = {key: value for key, value in changes.items() if key not in _SHARED}
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
            # Zero points are a matter of integers; a rule for others need not say so.
            symmetric=symmetric or (named.element.table is not None and "symmetric" not in changes),
            scale_dtype=named.scale_dtype,
            two_levels=named.two_levels,
            activations=named.activations,
            sparsity=self._sparsity(changes, named),
            method=self.method,
            options=replace(self.options, **own),
            reason=reason,
        )
        if (
            named.element.table is None
            or own
            or METHODS[self.method].scheme_refusal(settings.typical) is None
        ):
            return settings
        static = named.activations is not None and not named.activations.dynamic
        rounding = STATIC_ROUNDING if static else ROUNDING
        # Of few values the largest scale is rarely the best.
        options = RTNOptions(clip_search=named.element.bits == INT4.bits)
        return replace(settings, method=rounding, options=options)

    def _sparsity(self, changes: Mapping[str, Any], named: NamedScheme) -> Sparsity | None:
        """Pruning is a matter of integers; a rule for others need not say that they stay dense."""
        if named.element.table is not None and "sparsity" not in changes:
            return None
        return SPARSITIES.get(changes.get("sparsity", self.sparsity))

    def names_module(self, module: str) -> bool:
        """Whether an override means ``module`` by its own name, the last part, and not by its place alone.

        What stays in 16 bits by default is quantised by such an override.
        """
        decides = next((each for each in self.overrides if each.matches(module)), None)
        return decides is not None and not decides.matches(module[: module.rfind(".") + 1])

    def unused_overrides(self, modules: Iterable[str]) -> tuple[Override, ...]:
        """The rules that decide for none of ``modules``: usually a mistyped pattern."""
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
        changes = dict(values) | {"overrides": tuple(_override_of(rule) for rule in rules)}
        return cls._changed(None, changes)

    def quality_record(self) -> dict[str, Any]:
        """The quality's name and version, and which of its settings have other values here; options that the
        recipe's method does not have are none."""
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
        # Beside another method than its own, a quality's options of that method mean nothing.
        known = (*own, *names)
        changes = {**{key: value for key, value in named.items() if key in known}, **changes}
        for key in changes:
            if key not in known:
                raise UsageError(
                    f"recipe: unknown key {key!r}; expected one of {', '.join(known)} with method {method}"
                )
        changes = cls._one_target(changes)
        kept = recipe.options if recipe and recipe.method == method else options()
        chosen = {key: value for key, value in changes.items() if key in names}
        if recipe is not None and recipe.allocation and recipe._is_other_target(changes):
            # It was chosen for another target, loader or format.
            changes = {"allocation": {}, **changes}
        # A list is how YAML and JSON write a tuple.
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
    """A recipe, from one, from its settings by name, or from None, the defaults.

    Raises:
        UsageError: it is anything else, or as :meth:`Recipe.from_dict`.
    """
    if value is None or isinstance(value, Recipe):
        return value or Recipe()
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    raise UsageError(
        f"recipe: expected a marlinq.Recipe or a dict of its settings, found {type(value).__name__}; "
        "read_recipe reads a YAML file"
    )


def read_recipe(path: Path) -> Recipe:
    """Read a YAML recipe; keys that are absent keep their defaults.

    Raises:
        UsageError: the file can't be read, is not a YAML mapping, or holds an unknown key or bad value.
    """
    try:
        values = load_yaml(read_regular(path, MAX_YAML_BYTES))
    except OSError as error:
        raise UsageError(f"{path}: can't read the recipe: {error.strerror or error}") from None
    except ValueError as error:
        raise UsageError(f"{path}: not a YAML recipe: {str(error)[:300]}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected a mapping of recipe keys, found {type(values).__name__}")
    try:
        return Recipe.from_dict(values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _override_of(rule: Any) -> Override:
    if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
        raise UsageError(
            f"recipe: overrides: expected a mapping with a regular expression 'match', found {rule!r}"
        )
    settings = {key: value for key, value in rule.items() if key not in ("match", "skip")}
    skip = rule.get("skip", False)
    Flag().check(f"override {rule['match']!r}: skip", skip)
    return Override(rule["match"], skip=skip, settings=settings)


def common_group_size(in_features: Iterable[int]) -> int | None:
    """The largest automatic group size that divides every K of ``in_features``; None if none does."""
    common = math.gcd(*in_features)
    return next((size for size in AUTO_GROUP_SIZES if common % size == 0), None)


_TARGETS = ("target_bits", "target_size")
_ALLOCATED_FOR = (*_TARGETS, "served_by", "format")
_SHARED = ("scheme", "group_size", "symmetric", "sparsity")
"""The keys that every method has and an override may change."""


def _kinds_of_a_module() -> dict[str, Kind]:
    """What an override may hold: the shared keys and the options of every method that there is."""
    own = kinds(Recipe)
    known = {key: own[key] for key in _SHARED}
    for method in METHODS.values():
        known = kinds(method.options) | known
    return {**{key: own[key] for key in _SHARED}, **known}
