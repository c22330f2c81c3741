"""The plan of a quantise run: every output tensor, decided before any weight is read.

The plan for one linear is in ``planned_module.py``, the choice of linears in ``chosen_modules.py``, and
warnings about the finished plan are in ``plan_notes.py``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from marlinq.core.errors import CheckpointError
from marlinq.core.rules import Keep
from marlinq.formats import FORMATS, Format
from marlinq.formats.dialects import DIALECTS, write_quantization_config
from marlinq.methods import Method
from marlinq.models import Block, Blueprint, Conversion, TensorNames, converted
from marlinq.operations.quantize.chosen_modules import choose_modules, tied_to
from marlinq.operations.quantize.planned_module import (
    AutomaticGroups,
    PlannedModule,
    module_note,
    packed_tensors,
)
from marlinq.operations.quantize.recipe import Recipe


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
    modules, skipped, automatic = choose_modules(checkpoint, blueprint, names, form, recipe)
    kept = {name: keep for name, keep in {**blueprint.kept, **skipped}.items() if name not in modules}
    extra = extra_linears(checkpoint, blueprint, names)
    head = modules.get(blueprint.head) if blueprint.head is not None else None
    untied = head is not None and tied_to(blueprint, head.projection) is not None
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
