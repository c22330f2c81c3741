"""Units: groups of modules that a loader needs in one scheme, and the schemes that each may get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from marlinq.checkpoint import Checkpoint, TensorPlan
from marlinq.core.errors import UnsupportedError
from marlinq.core.rules import Keep
from marlinq.core.schemes import named_scheme
from marlinq.formats import FORMATS
from marlinq.formats.dialects.name_patterns import expert_layer
from marlinq.models import Blueprint, Projection, TensorNames
from marlinq.operations.inspect.eligibility import Whole, loading_refusal, server_named
from marlinq.operations.inspect.parallel import LinearFacts
from marlinq.operations.inspect.servers import Server
from marlinq.operations.quantize.candidates import CANDIDATES, KEPT
from marlinq.operations.quantize.chosen_modules import wanted_modules
from marlinq.operations.quantize.planned_module import PlannedModule, packed_tensors, plan_module
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.spelling import spelled


@dataclass(frozen=True)
class Option:
    """One scheme that a unit may get.

    Attributes:
        candidate: name in :data:`CANDIDATES`.
        nbytes: bytes of all stored tensors of the unit with this scheme.
        planned: plan for each projection of the unit; empty where it stays unquantised.
    """

    candidate: str
    nbytes: int
    planned: tuple[PlannedModule, ...]


@dataclass(frozen=True)
class Unit:
    """Projections that get one scheme.

    Attributes:
        name: name of the fused layer, of a layer's experts, or of the only projection.
        projections: its projections, in the order of the model.
        options: schemes that it may get, at least one, in the order of :data:`CANDIDATES`.
        refused: name of every other candidate -> why it is no option.
    """

    name: str
    projections: tuple[Projection, ...]
    options: tuple[Option, ...]
    refused: Mapping[str, str]

    @property
    def weights(self) -> int:
        """Number of weights in all its projections."""
        return sum(each.in_features * each.out_features for each in self.projections)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of its modules in a recipe's allocation."""
        layers = (expert_layer(each.name) or each.name for each in self.projections)
        return tuple(dict.fromkeys(layers))


def fuses(served_by: str) -> bool:
    """Whether the loader that ``--for`` names fuses layers."""
    server = server_named(served_by)
    return server is not None and bool(server.fused)


def units_of(checkpoint: Checkpoint, blueprint: Blueprint, recipe: Recipe) -> tuple[Unit, ...]:
    """The units whose scheme is to be chosen: all linears without an override, except the output head.

    Raises:
        UnsupportedError: there is no such linear, or none can be quantised for the loader.
    """
    names = TensorNames(blueprint, checkpoint.tensors, source=str(checkpoint.path))
    server = server_named(recipe.served_by)
    free = free_projections(blueprint, names, recipe)
    units = tuple(
        _unit(checkpoint, names, recipe, server, blueprint, name, members)
        for name, members in _together(free, server).items()
    )
    if not units:
        raise UnsupportedError(
            f"{checkpoint.path}: overrides decide every linear, so nothing is left to choose; leave out "
            f"{spelled('target_bits')} and {spelled('target_size')}"
        )
    if all(option.candidate == KEPT for unit in units for option in unit.options):
        ((reason, _),) = Counter(units[0].refused.values()).most_common(1)
        raise UnsupportedError(
            f"{units[0].name}: no scheme is left that {recipe.served_by} takes in {recipe.format}: {reason}; "
            f"choose another {spelled('served_by')} or {spelled('format')}"
        )
    return units


def free_projections(blueprint: Blueprint, names: TensorNames, recipe: Recipe) -> list[Projection]:
    """The projections whose scheme is chosen, in the order of the tree. ``recipe`` has no allocation yet."""
    wanted, _ = wanted_modules(blueprint, names, recipe)
    return [
        projection
        for projection, _ in wanted
        if projection.name != blueprint.head
        and not any(override.matches(projection.name) for override in recipe.overrides)
    ]


def _together(projections: Iterable[Projection], server: Server | None) -> dict[str, list[Projection]]:
    """Name of a unit -> its projections, in the order of the model."""
    free = {each.name: each for each in projections}
    fused = {} if server is None else server.fused
    whole_of = {member: (whole, members) for whole, members in fused.items() for member in members}
    together: dict[str, list[Projection]] = {}
    for name, projection in free.items():
        parent, _, last = name.rpartition(".")
        whole, members = whole_of.get(last, ("", ()))
        unit = name
        if (layer := expert_layer(name)) is not None:
            unit = layer
        elif whole and all(f"{parent}.{member}" in free for member in members):
            unit = f"{parent}.{whole}"
        together.setdefault(unit, []).append(projection)
    return together


def _unit(
    checkpoint: Checkpoint,
    names: TensorNames,
    recipe: Recipe,
    server: Server | None,
    blueprint: Blueprint,
    name: str,
    projections: Sequence[Projection],
) -> Unit:
    options, refused = [], {}
    for candidate in CANDIDATES:
        option = _option(checkpoint, names, recipe, server, blueprint, candidate, projections)
        if isinstance(option, str):
            refused[candidate] = option
        else:
            options.append(option)
    return Unit(name, tuple(projections), tuple(options), refused)


def _option(
    checkpoint: Checkpoint,
    names: TensorNames,
    recipe: Recipe,
    server: Server | None,
    blueprint: Blueprint,
    candidate: str,
    projections: Sequence[Projection],
) -> Option | str:
    """The option of a unit for a candidate, or why it is none."""
    settings = recipe.candidate_settings(candidate)
    if isinstance(settings, Keep):
        return Option(candidate, sum(dense_bytes(checkpoint, names, each) for each in projections), ())
    form = FORMATS[recipe.format]
    if (reason := form.scheme_refusal(settings.typical)) is not None:
        return reason
    planned = []
    for projection in projections:
        module = plan_module(checkpoint, names, form, projection, settings)
        if isinstance(module, str):
            return module
        planned.append(module)
    if server is not None:
        layers = {each.stored: _layer(each, form.name) for each in planned}
        whole = Whole(
            layout=form.name,
            rules=form.dialect == "gptq",
            unquantized=(),
            heads=None,
            kv_heads=None,
            architecture=blueprint.architecture,
        )
        if (reason := loading_refusal(server, layers, whole)) is not None:
            return reason
    return Option(
        candidate, sum(each.nbytes for one in planned for each in packed_tensors(one)), tuple(planned)
    )


def _layer(planned: PlannedModule, layout: str) -> LinearFacts:
    spec = planned.spec
    symmetric = not planned.layout.as_stored(spec.scheme).stores_zeros
    return LinearFacts(
        layout=layout,
        in_features=spec.in_features,
        out_features=spec.out_features,
        element=spec.scheme.element,
        granularity=spec.scheme.granularity,
        declared_symmetric=symmetric,
        symmetric=symmetric,
        named=named_scheme(spec.scheme),
    )


def dense_bytes(checkpoint: Checkpoint, names: TensorNames, projection: Projection) -> int:
    """Bytes of a projection's weight as the source stores it."""
    stored = names.holder(projection)
    shape = (projection.out_features, projection.in_features)
    return TensorPlan(stored, checkpoint.tensors[stored].dtype, shape).nbytes
