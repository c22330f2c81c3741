"""What a quantise run was asked to do: a value that can be read, written, compared and stored.

The same keys are used by a YAML recipe file, by the manifest of an output folder and by ``--override``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from marlinq.core.errors import UsageError
from marlinq.core.files import read_regular
from marlinq.core.patterns import MAX_CHARACTERS, Pattern, Patterns
from marlinq.core.scheme import Scheme
from marlinq.formats import LAYOUTS

GROUP_SIZES = (32, 64, 128, -1)
ACT_ORDERS = ("none", "static")

_MAX_RECIPE_BYTES = 1_000_000

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


@dataclass(frozen=True)
class ModuleSettings:
    """How one linear is quantised. ``reason`` says where the settings come from."""

    group_size: int
    symmetric: bool
    clip_search: bool
    damp: float
    act_order: str
    reason: str


@dataclass(frozen=True)
class ModuleSkip:
    """A linear that stays unquantised, and why."""

    reason: str


@dataclass(frozen=True)
class Override:
    """One rule for the modules whose full name ``pattern`` is found in.

    The pattern is a Python regular expression, case-sensitive and found anywhere in the name
    (``re.search``): ``down_proj`` matches every down projection, ``^model\\.layers\\.0\\.`` the first block.
    ``settings`` is empty when ``skip`` is true; otherwise it holds at least one of the keys group_size,
    symmetric, clip_search, damp and act_order.
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
        for key, value in self.settings.items():
            where = f"override {self.pattern!r}: {key}"
            if key not in _CHECKS_OF_A_MODULE:
                raise UsageError(f"{where}: unknown key; expected one of {', '.join(_CHECKS_OF_A_MODULE)}")
            _CHECKS_OF_A_MODULE[key](where, value)

    @cached_property
    def _compiled(self) -> Pattern:
        return Patterns("override", UsageError).compile(self.pattern)

    def concerns(self, module: str) -> bool:
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
        names = "|".join([*_CHECKS_OF_A_MODULE, "sym"])
        match = re.fullmatch(rf"(.+?)=((?:{names})=[^=,]+(?:,(?:{names})=[^=,]+)*)", text)
        if match is None:
            raise UsageError(
                f"--override {text!r}: expected REGEX=skip or REGEX=key=value[,key=value] with a key of "
                f"{', '.join(_CHECKS_OF_A_MODULE)}"
            )
        settings: dict[str, Any] = {}
        for item in match[2].split(","):
            key, value = item.split("=")
            key = "symmetric" if key == "sym" else key
            if key in settings:
                raise UsageError(f"--override {text!r}: {key} is given twice; keep one")
            settings[key] = _from_text(f"--override {text!r}: {key}", key, value.strip())
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
        format: the output layout, a name in :data:`marlinq.formats.LAYOUTS`.
        group_size: input channels a scale, one of 32, 64, 128, or -1 for one group a layer.
        symmetric: zero point fixed in the middle of the codes.
        clip_search: choose each group's scale by the error it causes, instead of by its largest weight.
        damp: share of the Hessian's mean diagonal that is added to it, 0 < damp < 1.
        act_order: "static": groups, and channels within each, by falling Hessian diagonal, with g_idx staying
            trivial; or "none": as they come.
        calibration: "self", a file, or the name of a dataset.
        samples: calibration documents.
        max_length: tokens that a document is cut to.
        seed: of the calibration's random choices.
        overrides: the first rule whose pattern is found in a module's name decides what differs there.

    Raises:
        UsageError: a value is of the wrong type or out of range, or the format can't hold what is asked.
    """

    format: str = "gptq"
    group_size: int = 128
    symmetric: bool = True
    clip_search: bool = True
    damp: float = 0.01
    act_order: str = "static"
    calibration: str = "self"
    samples: int = 128
    max_length: int = 2048
    seed: int = 0
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        for key, check in _CHECKS.items():
            check(key, getattr(self, key))
        layout = LAYOUTS[self.format]
        named = [("recipe", self.symmetric)]
        named += [(f"override {o.pattern!r}", o.settings.get("symmetric", True)) for o in self.overrides]
        for where, symmetric in named:
            reason = layout.scheme_refusal(Scheme(zero_point="midpoint" if symmetric else "stored"))
            if reason is not None:
                raise UsageError(f"{where}: {layout.name} can't hold {reason}; choose another --format")

    def settings_for(self, module: str) -> ModuleSettings | ModuleSkip:
        """How to quantise the linear called ``module`` (its full dotted name), or why not to."""
        own = {key: getattr(self, key) for key in _CHECKS_OF_A_MODULE}
        for override in self.overrides:
            if override.concerns(module):
                if override.skip:
                    return ModuleSkip(f"override {override.pattern!r} skips it")
                return ModuleSettings(
                    **(own | dict(override.settings)), reason=f"override {override.pattern!r}"
                )
        return ModuleSettings(**own, reason="recipe")

    def unused_overrides(self, modules: list[str]) -> tuple[Override, ...]:
        """The rules that decide for none of ``modules``: usually a mistyped pattern."""
        used = set()
        for module in modules:
            used.add(next((i for i, o in enumerate(self.overrides) if o.concerns(module)), None))
        return tuple(o for i, o in enumerate(self.overrides) if i not in used)

    def to_dict(self) -> dict[str, Any]:
        """A plain mapping for YAML and JSON; ``from_dict`` gives back an equal recipe."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        return plain | {"overrides": [override.to_dict() for override in self.overrides]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Recipe:
        """The recipe of a mapping; absent keys keep their defaults.

        Raises:
            UsageError: an unknown key, or a value of the wrong type or out of range.
        """
        names = [f.name for f in fields(cls)]
        for key in values:
            if key not in names:
                raise UsageError(f"recipe: unknown key {key!r}; expected one of {', '.join(names)}")
        rules = values.get("overrides", [])
        if not isinstance(rules, list):
            raise UsageError(f"recipe: overrides: expected a list of rules, found {rules!r}")
        return cls(**(dict(values) | {"overrides": tuple(_override_of(rule) for rule in rules)}))

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)


def read_recipe(path: Path) -> Recipe:
    """Read a YAML recipe; keys that are absent keep their defaults.

    Raises:
        UsageError: the file can't be read, is not a YAML mapping, or holds an unknown key or bad value.
    """
    try:
        values = yaml.safe_load(read_regular(path, _MAX_RECIPE_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: can't read the recipe: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # A date that does not exist is a ValueError of Python's.
        problem = " ".join(str(error).split())[:300]
        raise UsageError(f"{path}: not a YAML recipe: {problem}") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: expected a mapping of recipe keys, found {type(values).__name__}")
    try:
        return Recipe.from_dict(values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write ``recipe`` as YAML that ``read_recipe`` turns into an equal value."""
    path.write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")


def _override_of(rule: Any) -> Override:
    if not isinstance(rule, dict) or not isinstance(rule.get("match"), str):
        raise UsageError(
            f"recipe: overrides: expected a mapping with a regular expression 'match', found {rule!r}"
        )
    settings = {key: value for key, value in rule.items() if key not in ("match", "skip")}
    skip = rule.get("skip", False)
    _expect_bool(f"override {rule['match']!r}: skip", skip)
    return Override(rule["match"], skip=skip, settings=settings)


def _from_text(where: str, key: str, text: str) -> Any:
    if key in ("symmetric", "clip_search"):
        lowered = text.lower()
        if lowered not in (*_TRUE, *_FALSE):
            raise UsageError(f"{where}: expected true or false, found {text!r}")
        return lowered in _TRUE
    if key in ("group_size", "damp"):
        try:
            return int(text) if key == "group_size" else float(text)
        except ValueError:
            raise UsageError(f"{where}: expected a number, found {text!r}") from None
    return text


def _expect_bool(where: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{where}: expected true or false, found {value!r}")


def _expect_fraction(where: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
        raise UsageError(f"{where}: expected a number above 0 and below 1, found {value!r}")


def _expect_text(where: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{where}: expected a name or path, found {value!r}")


def _expect_layout(where: str, value: Any) -> None:
    # Layouts can be registered at any time, so the choices are those of the moment.
    _OneOf(*LAYOUTS)(where, value)


class _OneOf:
    def __init__(self, *choices: Any) -> None:
        self.choices = choices

    def __call__(self, where: str, value: Any) -> None:
        # True == 1 and 64.0 == 64 in Python, but neither is what a recipe means.
        if not any(value == choice and type(value) is type(choice) for choice in self.choices):
            raise UsageError(
                f"{where}: expected one of {', '.join(str(c) for c in self.choices)}, found {value!r}"
            )


class _AtLeast:
    def __init__(self, lowest: int) -> None:
        self.lowest = lowest

    def __call__(self, where: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < self.lowest:
            raise UsageError(f"{where}: expected a whole number of at least {self.lowest}, found {value!r}")


_CHECKS_OF_A_MODULE: dict[str, Callable[[str, Any], None]] = {
    "group_size": _OneOf(*GROUP_SIZES),
    "symmetric": _expect_bool,
    "clip_search": _expect_bool,
    "damp": _expect_fraction,
    "act_order": _OneOf(*ACT_ORDERS),
}
_CHECKS = _CHECKS_OF_A_MODULE | {
    "format": _expect_layout,
    "calibration": _expect_text,
    "samples": _AtLeast(1),
    "max_length": _AtLeast(1),
    "seed": _AtLeast(0),
}
