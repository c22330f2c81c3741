"""The plan of a quantise run: every output tensor, decided before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marlinq.checkpoint import (
    Checkpoint,
    TensorPlan,
    check_stacks,
    floating_linears,
    misplaced,
    replace_quantization_config,
    says_untied,
    untied_config,
)
from marlinq.core.dtypes import FLOATS
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.granularity import Granularity
from marlinq.core.rules import Keep
from marlinq.formats import FORMATS, Format, Layout, ModuleSpec
from marlinq.formats.dialects import DIALECTS, write_quantization_config
from marlinq.formats.dialects.name_patterns import FUSED
from marlinq.methods import METHODS, Method, MethodOptions
from marlinq.models import Block, Blueprint, Conversion, Projection, TensorNames, converted
from marlinq.operations.inspect.servers import built_plain
from marlinq.operations.quantize.module_settings import AUTO_GROUP_SIZES, ModuleSettings, common_group_size
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.recipe_settings import UNQUANTIZED
from marlinq.operations.quantize.spelling import spelled

_GROUP_SIZES = (*AUTO_GROUP_SIZES, -1)
"""group sizes that a message may advise"""
_MOST_GPUS = 8
"""largest number of GPUs over which tensor parallelism splits layers"""


@dataclass(frozen=True)
class PlannedModule:
    """One projection that will be quantised.

    Attributes:
        projection: the projection in the model.
        stored: name of the module in the output; the layout adds suffixes for its tensors.
        source: name of the checkpoint's tensor with its weight; for a tied head, the embedding's.
        method: method that quantises its weight.
        options: options of the method.
        layout: layout of its tensors.
        spec: shape and scheme in the output.
        reason: source of scheme and options, as text.
        granularity: weights that share a scale, as asked for; where a group would be as wide as the module or
            wider, :attr:`spec` has one scale per channel instead.
    """

    projection: Projection
    stored: str
    source: str
    method: Method[Any, Any]
    options: MethodOptions
    layout: Layout
    spec: ModuleSpec
    reason: str
    granularity: Granularity


@dataclass(frozen=True)
class AutomaticGroups:
    """The group size of all modules whose group size is ``auto``.

    Attributes:
        size: input channels per scale.
        in_features: distinct K of these modules, ascending.
    """

    size: int
    in_features: tuple[int, ...]

    @classmethod
    def of(cls, in_features: Iterable[int]) -> AutomaticGroups | None:
        """The largest automatic size that divides all of ``in_features``; None where there is none."""
        different = tuple(sorted(set(in_features)))
        size = common_group_size(different)
        return None if not different or size is None else cls(size, different)

    def describe(self) -> str:
        """Size and reason in one line."""
        sizes = f"{', '.join(map(str, AUTO_GROUP_SIZES[:-1]))} and {AUTO_GROUP_SIZES[-1]}"
        different = ", ".join(map(str, self.in_features))
        return f"{self.size}: the largest of {sizes} that divides every linear's input channels ({different})"


@dataclass(frozen=True)
class OutputPlan:
    """Contents of the output folder.

    Attributes:
        format: format of the output.
        method: calibrated method of any module; without one, the first module's method.
        modules: quantised projections by name, in the order of the model; the output head comes last.
        automatic: group size that was chosen for ``auto``; None where the recipe names all sizes.
        head: the output head; None where it is not quantised.
        untied: whether the head was tied to the embedding and gets a weight of its own.
        kept: modules with a weight matrix that stay unquantised, with reasons.
        tensors: every tensor of the output, in the source's order.
        carried: the source, with its unquantised tensors as the output will have them.
        copied: names of the tensors of ``carried`` that are copied unchanged.
        config: the output's ``config.json``.
        extra_json: file name -> content of further JSON files that loaders read.
    """

    format: Format
    method: Method[Any, Any]
    modules: Mapping[str, PlannedModule]
    automatic: AutomaticGroups | None
    head: PlannedModule | None
    untied: bool
    kept: Mapping[str, Keep]
    tensors: tuple[TensorPlan, ...]
    carried: Checkpoint
    copied: tuple[str, ...]
    config: Mapping[str, Any]
    extra_json: Mapping[str, Mapping[str, Any]]

    def members(self, block: Block) -> list[PlannedModule]:
        """The projections of a decoder block that will be quantised."""
        return [
            self.modules[projection.name]
            for projection in block.projections
            if projection.name in self.modules
        ]

    def tensor_names(self, planned: PlannedModule) -> dict[str, str]:
        """Suffix -> name of each output tensor of a quantised module."""
        return {suffix: f"{planned.stored}.{suffix}" for suffix in planned.layout.expected(planned.spec)}

    def is_written(self, planned: PlannedModule, written: set[str], notes: Container[str]) -> bool:
        """Whether a quantised module is complete: all its tensors are written and its note is there.

        Both are checked because tensors can be committed before their note.
        """
        return module_note(planned) in notes and written.issuperset(self.tensor_names(planned).values())

    def are_written(self, members: Iterable[PlannedModule], written: set[str], notes: Container[str]) -> bool:
        """Whether :meth:`is_written` holds for all of ``members``."""
        return all(self.is_written(planned, written, notes) for planned in members)


def module_note(planned: PlannedModule) -> str:
    """Key of the writer's note about a quantised module."""
    return f"module {planned.stored}"


def plan_output(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    recipe: Recipe,
    *,
    stored: Checkpoint | None = None,
    conversions: Sequence[Conversion] = (),
) -> OutputPlan:
    """Decides what becomes of every tensor of ``checkpoint``.

    Args:
        checkpoint: the source; with ``conversions``, as :func:`~marlinq.models.converted` has it.
        blueprint: its model.
        recipe: settings of the run.
        stored: the source as it is stored; by default ``checkpoint``.
        conversions: from ``stored`` to ``checkpoint``. Those that make a quantised matrix are written as the
            model has them; what the others are made from is copied as it is stored.

    Raises:
        UnsupportedError: a linear does not fit the layout; the message names it and the override that keeps
            it unquantised.
        CheckpointError: a parameter of the model is not stored, or in another shape.
        ConversionRefused: the layout's config can't express the settings.
    """
    names = TensorNames(blueprint, checkpoint.tensors, source=str(checkpoint.path))
    _check_parameters(checkpoint, blueprint, names)
    form = FORMATS[recipe.format]
    modules, skipped, automatic = _choose(checkpoint, blueprint, names, form, recipe)
    kept = {name: keep for name, keep in {**blueprint.kept, **skipped}.items() if name not in modules}
    extra = extra_linears(checkpoint, blueprint, names)
    head = modules.get(blueprint.head) if blueprint.head is not None else None
    untied = head is not None and _tied_to(blueprint, head.projection) is not None
    replaced: dict[str, list[PlannedModule]] = {}
    for planned in modules.values():
        if planned is not head or planned.source == f"{planned.stored}.weight":
            replaced.setdefault(planned.source, []).append(planned)
    carried = converted(
        checkpoint if stored is None else stored,
        [each for each in conversions if each.parameters.keys() & replaced.keys()],
    )
    # The config names these linears as the files do, because servers look them up under these names, and as
    # the model does, because transformers looks them up under those.
    in_memory = [name for name in kept if name in blueprint.by_name or name in blueprint.routers]
    as_stored = floating_linears(
        carried, [name for name in carried.tensors if name not in checkpoint.tensors]
    )
    aliases = {
        name: planned.spec for name, planned in modules.items() if form.dialect == "compressed-tensors"
    }
    quantization_config = write_quantization_config(
        form,
        {planned.stored: planned.spec for planned in modules.values()} | aliases,
        list(dict.fromkeys([*_unquantized(blueprint, names, kept), *as_stored, *extra, *in_memory])),
    )
    tensors: list[TensorPlan] = []
    for name, info in carried.tensors.items():
        if name not in replaced:
            tensors.append(TensorPlan(name, info.dtype, info.shape))
        for planned in replaced.get(name, ()):
            tensors.extend(packed_tensors(planned))
    if head is not None and head.source not in replaced:
        tensors.extend(packed_tensors(head))
    copied = tuple(name for name in carried.tensors if name not in replaced)
    layouts = {planned.stored: planned.layout for planned in modules.values()}
    for name in copied:
        reason = misplaced(name, form, layouts)
        if reason is not None:
            raise CheckpointError(f"{checkpoint.path}: in the output, {reason}")
    if form.stacked:
        check_stacks(tensors)
    config = replace_quantization_config(checkpoint.config, quantization_config)
    # A head with a weight of its own: loaders that trust a missing or true tie would not read it.
    mistied = not says_untied(config) and blueprint.head is not None and not blueprint.tied
    return OutputPlan(
        format=form,
        method=_method(modules.values()),
        modules=modules,
        automatic=automatic,
        head=head,
        untied=untied,
        kept={**kept, **extra},
        tensors=tuple(tensors),
        carried=carried,
        copied=copied,
        config=untied_config(config) if untied or mistied else config,
        extra_json=DIALECTS[form.dialect].extra_files(quantization_config),
    )


def _method(modules: Iterable[PlannedModule]) -> Method[Any, Any]:
    """The calibrated method of any module, else that of the first."""
    methods = [planned.method for planned in modules]
    return next((method for method in methods if method.calibrated), methods[0])


def split_notes(blueprint: Blueprint, plan: OutputPlan) -> list[str]:
    """Warnings about experts whose groups are too large to split them over 8 GPUs.

    Servers split an expert's intermediate channels, which are few, into shares of whole groups.
    """
    notes: dict[tuple[int, int], str] = {}
    for experts in (each for block in blueprint.blocks for each in block.experts):
        planned = plan.modules.get(experts.of(0)[1].name)
        size = 0 if planned is None else planned.granularity.channels
        k = experts.intermediate
        fitting = [small for small in (64, 32) if small < size and k % (_MOST_GPUS * small) == 0]
        if fitting and k % (_MOST_GPUS * size):
            most = max(gpus for gpus in range(1, _MOST_GPUS + 1) if k % (gpus * size) == 0)
            notes[k, size] = (
                f"experts of {k} channels in groups of {size} can be split over at most {most} GPUs; "
                f"--group-size {fitting[0]} can over {_MOST_GPUS}"
            )
    return list(notes.values())


def fused_notes(blueprint: Blueprint, plan: OutputPlan) -> list[str]:
    """Warnings about linears that servers fuse into one layer but that have different schemes."""
    notes: dict[str, str] = {}
    for block in blueprint.blocks:
        names = {projection.name for projection in block.projections}
        for _, parts in FUSED:
            for first in (name for name in names if name.rpartition(".")[2] == parts[0]):
                parent = first.rpartition(".")[0]
                members = [f"{parent}.{part}" for part in parts]
                ways = {name.rpartition(".")[2]: _way(plan.modules.get(name)) for name in members}
                if not names.issuperset(members) or len(set(ways.values())) == 1:
                    continue
                inner = re.sub(r"^.*?\.\d+\.", "", parent)
                told = ", ".join(f"{part} {way}" for part, way in ways.items())
                notes.setdefault(
                    inner,
                    f"{parent}: {told}; vLLM and SGLang make one layer of them and load one scheme only; let "
                    f"the rule name all: --override '{re.escape(inner)}\\.({'|'.join(parts)})$=...'",
                )
    return list(notes.values())


def packed_tensors(planned: PlannedModule) -> list[TensorPlan]:
    """The output tensors of a quantised module."""
    return [
        TensorPlan(f"{planned.stored}.{suffix}", tensor.dtype, tensor.shape)
        for suffix, tensor in planned.layout.expected(planned.spec).items()
    ]


def _tied_to(blueprint: Blueprint, head: Projection) -> str | None:
    """The parameter that the head shares its weight with, or None."""
    shared = {**{owner: name for name, owner in blueprint.tied.items()}, **blueprint.tied}
    return shared.get(head.parameter)


def _check_parameters(checkpoint: Checkpoint, blueprint: Blueprint, names: TensorNames) -> None:
    for name, shape in blueprint.parameters.items():
        for stored, expected in names.places(name, shape):
            found = checkpoint.tensors[stored].shape
            if found != expected:
                raise CheckpointError(
                    f"{checkpoint.path}: tensor {stored!r}: expected shape {list(expected)} from "
                    f"config.json, found {list(found)}"
                )


def _unquantized(blueprint: Blueprint, names: TensorNames, kept: Iterable[str]) -> list[str]:
    """Stored names of the linears and routers in ``kept``, which the config must call unquantised."""
    tensors = []
    for module in kept:
        projection = blueprint.by_name.get(module)
        if projection is not None:
            tensors.append(names.module(projection))
        elif module in blueprint.routers:
            tensors.append((names.own(f"{module}.weight") or f"{module}.weight").removesuffix(".weight"))
    return tensors


def extra_linears(checkpoint: Checkpoint, blueprint: Blueprint, names: TensorNames) -> dict[str, Keep]:
    """Stored linears that the model class does not use, such as layers for multi-token prediction.

    They are copied as they are. The config calls them unquantised, for loaders that do use them.
    """
    placed = {
        stored for name, shape in blueprint.parameters.items() for stored, _ in names.places(name, shape)
    }
    others = [*blueprint.tied, *blueprint.buffers, *blueprint.computed]
    placed.update(stored for name in others if (stored := names.own(name)) is not None)
    reason = f"carried as stored: {blueprint.architecture} does not run it"
    rest = [name for name in checkpoint.tensors if name not in placed]
    return {module: Keep(reason) for module in floating_linears(checkpoint, rest)}


def _choose(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    names: TensorNames,
    form: Format,
    recipe: Recipe,
) -> tuple[dict[str, PlannedModule], dict[str, Keep], AutomaticGroups | None]:
    chosen, kept = wanted_modules(blueprint, names, recipe)
    automatic = AutomaticGroups.of(each.in_features for each in _automatic(chosen))
    modules: dict[str, PlannedModule] = {}
    refused: list[tuple[str, str]] = []
    sizes, other = list(_GROUP_SIZES), "--format"
    for projection, settings in chosen:
        planned = plan_module(checkpoint, names, form, projection, settings, automatic)
        if isinstance(planned, str):
            refused.append((projection.name, planned))
            other = other if settings.element.table is None else "--scheme or --format"
            sizes = [
                size
                for size in sizes
                if settings.element.table is None
                and not isinstance(
                    plan_module(checkpoint, names, form, projection, _in_groups(settings, size)), str
                )
            ]
        else:
            modules[projection.name] = planned
    if refused:
        name, reason = refused[0]
        pattern = name.rpartition(".")[2] + "$"
        others = f" (and {len(refused) - 1} more modules)" if len(refused) > 1 else ""
        fitting = f"--group-size {' or '.join(map(str, sizes))}, " if sizes else ""
        raise UnsupportedError(
            f"{name}{others}: {form.name}: {reason}; choose {fitting}another {other}, "
            f"or keep it unquantised with --override '{pattern}=skip'"
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


def plan_module(
    checkpoint: Checkpoint,
    names: TensorNames,
    form: Format,
    projection: Projection,
    settings: ModuleSettings,
    automatic: AutomaticGroups | None = None,
) -> PlannedModule | str:
    """The plan for one projection, or why ``form`` can't hold it.

    Args:
        checkpoint, names: the source and the names of its tensors.
        form: format of the output.
        projection: projection to quantise.
        settings: its scheme, method and options.
        automatic: group size for settings whose group size is ``auto``.

    Raises:
        UnsupportedError: the source's weight is not a dense one.
    """
    if (reason := settings.group_refusal(projection.in_features)) is not None:
        return reason
    if settings.granularity is None and automatic is not None:
        settings = replace(settings, granularity=Granularity.group(automatic.size))
    parts = names.in_parts(projection.parameter)
    stored = names.require(f"{projection.name}.weight" if parts else projection.parameter)
    layout = settings.layout(form)
    spec = _spec(layout, projection, settings, checkpoint.tensors[stored].dtype, stored)
    if (reason := layout.shape_refusal(spec)) is not None:
        return reason
    return PlannedModule(
        projection,
        names.module(projection),
        stored,
        METHODS[settings.method],
        settings.options,
        layout,
        spec,
        settings.reason,
        settings.granularity or spec.granularity,
    )


def _in_groups(settings: ModuleSettings, size: int) -> ModuleSettings:
    return replace(settings, granularity=Granularity.from_group_size(size))


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
            ways = {projection.name: _way(modules.get(projection.name)) for projection in experts.projections}
            other = next((name for name, way in ways.items() if way != ways[first]), None)
            if other is not None:
                raise UnsupportedError(
                    f"{other}: is {ways[other]}, {first} is {ways[first]}; the experts of a layer need one "
                    f"scheme for all loaders; let the override match all of {experts.name}"
                )


def _way(planned: PlannedModule | None) -> str:
    if planned is None:
        return "not quantised"
    # Where one group covers all channels, its size is shown: the experts' other matrices have more groups.
    asked, spec = planned.granularity, planned.spec
    if asked.kind == "group":
        asked = Granularity.group(spec.channels_per_group)
    return replace(spec.scheme, granularity=asked).describe()


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
    other = _tied_to(blueprint, head)
    own = names.own(head.parameter)
    if other is not None and own is not None and names.own(other) is None:
        raise UnsupportedError(
            f"tensor {own!r}: is the only copy of the embedding {other!r}, which stays in 16 bits; save the "
            f"model with transformers first, or leave out {spelled('quantize_head')}"
        )
    return head


def _spec(
    layout: Layout, projection: Projection, settings: ModuleSettings, stored: str, name: str
) -> ModuleSpec:
    if stored not in FLOATS:
        raise UnsupportedError(
            f"tensor {name!r}: expected float32, bfloat16 or float16 weights, found {stored}; "
            "pass the unquantised model"
        )
    # Scales take the model's dtype where the layout does not fix theirs; float16 for a float32 model.
    own = stored if stored != "float32" else "float16"
    scheme = settings.scheme(projection.in_features, layout.scale_dtype or own)
    scheme = replace(scheme, tensor_scale=layout.as_stored(scheme).tensor_scale)
    return ModuleSpec(projection.in_features, projection.out_features, scheme)
