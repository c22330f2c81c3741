"""Which linears a run quantises, and which stay unquantised, with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import MarlinqError, UnsupportedError
from marlinq.core.rules import Keep
from marlinq.core.schemes import SCHEMES
from marlinq.formats import FORMATS, Format
from marlinq.formats.dialects import write_quantization_config
from marlinq.models import Blueprint, Projection, TensorNames
from marlinq.operations.inspect.servers import built_plain
from marlinq.operations.quantize.module_settings import AUTO_GROUP_SIZES, ModuleSettings
from marlinq.operations.quantize.planned_module import (
    AutomaticGroups,
    PlannedModule,
    described_scheme,
    plan_module,
)
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.recipe_settings import UNQUANTIZED
from marlinq.operations.quantize.spelling import spelled

_GROUP_SIZES = (*AUTO_GROUP_SIZES, -1)
"""group sizes that a message may advise"""


def choose_modules(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    names: TensorNames,
    form: Format,
    recipe: Recipe,
) -> tuple[dict[str, PlannedModule], dict[str, Keep], AutomaticGroups | None]:
    """Plans every linear that ``recipe`` quantises.

    Returns:
        The planned linears by name, in the order of the model; those that the recipe keeps, with reasons; and
        the group size of those whose group size is ``auto``.

    Raises:
        UnsupportedError: the format can't hold a linear, nothing is quantised, or experts of a layer differ.
    """
    chosen, kept = wanted_modules(blueprint, names, recipe)
    modules, refused, automatic = _planned(checkpoint, names, form, chosen)
    if refused:
        name, reason = refused[0]
        pattern = name.rpartition(".")[2] + "$"
        others = f" (and {len(refused) - 1} more modules)" if len(refused) > 1 else ""
        ways = [*_fitting(checkpoint, blueprint, names, recipe), f"--override '{pattern}=skip'"]
        choice = f"choose {', '.join(ways[:-1])}, or keep" if len(ways) > 1 else "keep"
        raise UnsupportedError(
            f"{name}{others}: {form.name}: {reason}; {choice} it unquantised with {ways[-1]}"
        )
    if not modules:
        first, *rest = (kept or blueprint.kept).items()
        others = f" (and {len(rest)} more)" if rest else ""
        raise UnsupportedError(
            f"{checkpoint.path}: every linear stays unquantised, {first[0]}{others}: {first[1].reason}"
        )
    _check_experts(blueprint, modules)
    return modules, kept, automatic


def wanted_modules(
    blueprint: Blueprint, names: TensorNames, recipe: Recipe
) -> tuple[list[tuple[Projection, ModuleSettings]], dict[str, Keep]]:
    """The projections that ``recipe`` quantises, with their settings and the output head last; and the names
    of those that it keeps, with reasons.

    Raises:
        UnsupportedError: the recipe quantises an output head that can't be quantised.
    """
    shared = set(blueprint.tied) | set(blueprint.tied.values())
    chosen: list[tuple[Projection, ModuleSettings]] = []
    # Projections that a server always builds in 16 bits.
    plain: list[tuple[Projection, ModuleSettings]] = []
    kept: dict[str, Keep] = {}
    head = _head(blueprint, names, recipe)
    for projection in (*blueprint.projections(), *([] if head is None else [head])):
        settings = (recipe.head_rules if projection is head else recipe.rules).outcome(projection.name)
        usual = blueprint.usually_kept.get(projection.name)
        if isinstance(settings, Keep):
            kept[projection.name] = settings
        elif usual is not None and not recipe.names_module(projection.name):
            kept[projection.name] = usual
        elif projection.parameter in shared and projection is not head:
            kept[projection.name] = Keep("shares its weight with another module")
        elif built_plain(blueprint.architecture, projection.name) and not recipe.names_module(
            projection.name
        ):
            plain.append((projection, settings))
        else:
            chosen.append((projection, settings))
    if chosen:
        for projection, _ in plain:
            server = built_plain(blueprint.architecture, projection.name)
            kept[projection.name] = Keep(f"{server} builds it in 16 bits, whatever the config says")
    else:
        # Nothing else would be quantised: quantise these for the other loaders.
        chosen = plain
    return chosen, kept


def _head(blueprint: Blueprint, names: TensorNames, recipe: Recipe) -> Projection | None:
    """The output head, where the recipe quantises it.

    Raises:
        UnsupportedError: there is none, or its tensor is the only copy of the embedding.
    """
    if recipe.quantize_head == UNQUANTIZED:
        return None
    if blueprint.head is None:
        raise UnsupportedError(
            f"{blueprint.architecture}: has no linear output head to quantise; leave out "
            f"{spelled('quantize_head')}"
        )
    head = blueprint.by_name[blueprint.head]
    other = tied_to(blueprint, head)
    own = names.own(head.parameter)
    if other is not None and own is not None and names.own(other) is None:
        raise UnsupportedError(
            f"tensor {own!r}: is the only copy of the embedding {other!r}, which stays in 16 bits; save the "
            f"model with transformers first, or leave out {spelled('quantize_head')}"
        )
    return head


def tied_to(blueprint: Blueprint, head: Projection) -> str | None:
    """The parameter that the head shares its weight with, or None."""
    shared = {**{owner: name for name, owner in blueprint.tied.items()}, **blueprint.tied}
    return shared.get(head.parameter)


def _planned(
    checkpoint: Checkpoint,
    names: TensorNames,
    form: Format,
    chosen: Sequence[tuple[Projection, ModuleSettings]],
) -> tuple[dict[str, PlannedModule], list[tuple[str, str]], AutomaticGroups | None]:
    """(planned linears by name, (name, reason) of those that ``form`` can't hold, automatic group size)."""
    automatic = AutomaticGroups.of(each.in_features for each in _automatic(chosen))
    modules: dict[str, PlannedModule] = {}
    refused: list[tuple[str, str]] = []
    for projection, settings in chosen:
        planned = plan_module(checkpoint, names, form, projection, settings, automatic)
        if isinstance(planned, str):
            refused.append((projection.name, planned))
        else:
            modules[projection.name] = planned
    return modules, refused, automatic


def _fitting(
    checkpoint: Checkpoint, blueprint: Blueprint, names: TensorNames, recipe: Recipe
) -> Iterator[str]:
    """Single changes of ``recipe`` with which the format holds every linear, as options."""

    def fits(**changes: Any) -> bool:
        try:
            changed = replace(recipe, **changes)
            form = FORMATS[changed.format]
            chosen, _ = wanted_modules(blueprint, names, changed)
            # One linear of each shape and settings tells of all.
            different = {(each.in_features, each.out_features, how): (each, how) for each, how in chosen}
            modules, refused, _ = _planned(checkpoint, names, form, list(different.values()))
            if form.read_only is None and not refused:
                write_quantization_config(form, {one.stored: one.spec for one in modules.values()}, [])
                return True
        except MarlinqError:
            pass  # the recipe can't have this value, or the format these settings
        return False

    integers = SCHEMES[recipe.scheme].element.table is None
    sizes = [str(size) for size in _GROUP_SIZES if integers and fits(group_size=size)]
    yield from [f"--group-size {' or '.join(sizes)}"] if sizes else []
    forms = [name for name in FORMATS if name != recipe.format and fits(format=name)]
    yield from [f"--format {' or '.join(forms)}"] if forms else []
    schemes = [name for name in SCHEMES if not sizes and name != recipe.scheme and fits(scheme=name)]
    yield from [f"--scheme {' or '.join(schemes)}"] if schemes else []


def _automatic(chosen: Iterable[tuple[Projection, ModuleSettings]]) -> Iterator[Projection]:
    """The projections whose group size is ``auto`` and that one of the automatic sizes divides."""
    for projection, settings in chosen:
        if settings.granularity is None and settings.group_refusal(projection.in_features) is None:
            yield projection


def _check_experts(blueprint: Blueprint, modules: Mapping[str, PlannedModule]) -> None:
    """Checks that all experts of a layer have one scheme, as loaders need it.

    Raises:
        UnsupportedError: an override gives experts of a layer different schemes.
    """
    for block in blueprint.blocks:
        for experts in block.experts:
            first = experts.projections[0].name
            ways = {
                projection.name: described_scheme(modules.get(projection.name))
                for projection in experts.projections
            }
            other = next((name for name, way in ways.items() if way != ways[first]), None)
            if other is not None:
                raise UnsupportedError(
                    f"{other}: is {ways[other]}, {first} is {ways[first]}; the experts of a layer need one "
                    f"scheme for all loaders; let the override match all of {experts.name}"
                )
