"""The size of an allocation's output, and a check that an allocation in a recipe fits the model."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import UsageError
from marlinq.core.safe_text import shown
from marlinq.core.settings import NONE
from marlinq.models import Blueprint, TensorNames
from marlinq.operations.quantize.allocation.chosen import target_text
from marlinq.operations.quantize.allocation.units import dense_bytes, free_projections
from marlinq.operations.quantize.candidates import Members
from marlinq.operations.quantize.planned_module import packed_tensors
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.recipe import Recipe


@dataclass(frozen=True)
class Frame:
    """Sizes that the choice of schemes does not change.

    Attributes:
        weights: number of weights over which mean bits are taken.
        fixed: bytes of the weights among them whose scheme an override decides.
        rest: bytes of all tensors of the output except the units', with ``fixed``.
    """

    weights: int
    fixed: int
    rest: int

    def bits(self, nbytes: int) -> float:
        """Mean bits per weight where the units take ``nbytes`` bytes."""
        return 8 * (nbytes + self.fixed) / self.weights

    def budget(self, recipe: Recipe) -> int:
        """Bytes that the target of ``recipe`` leaves for the units."""
        if recipe.target_bits != NONE:
            return int(float(recipe.target_bits) * self.weights / 8) - self.fixed
        return int(recipe.target_size) - self.rest


def frame_of(
    checkpoint: Checkpoint, blueprint: Blueprint, recipe: Recipe, plan: OutputPlan, free: Container[str]
) -> tuple[Frame, int]:
    """(sizes in ``plan`` that the choice does not change, bytes of the projections named in ``free``)."""
    names = TensorNames(blueprint, checkpoint.tensors, source=str(checkpoint.path))
    weights = fixed = taken = 0
    for projection in blueprint.projections():
        is_free = projection.name in free
        if not is_free and not any(override.matches(projection.name) for override in recipe.overrides):
            continue
        planned = plan.modules.get(projection.name)
        if planned is None:
            nbytes = dense_bytes(checkpoint, names, projection)
        else:
            nbytes = sum(tensor.nbytes for tensor in packed_tensors(planned))
        weights += projection.in_features * projection.out_features
        fixed += 0 if is_free else nbytes
        taken += nbytes if is_free else 0
    return Frame(weights, fixed, sum(tensor.nbytes for tensor in plan.tensors) - taken), taken


def check_allocation(
    checkpoint: Checkpoint, blueprint: Blueprint, recipe: Recipe, plan: OutputPlan
) -> tuple[float, int]:
    """(mean bits per weight, bytes of all tensors) with the allocation of ``recipe``.

    Raises:
        UsageError: the allocation was chosen for another model: it names a module that is no linear, has no
            scheme for a linear, or takes more than the recipe's target.
    """
    names = TensorNames(blueprint, checkpoint.tensors, source=str(checkpoint.path))
    again = f"it was not chosen for {checkpoint.path}; leave out the allocation, and one is chosen"
    known: set[str] = set()
    for projection in blueprint.projections():
        name = projection.name
        while name and name not in known:
            known.add(name)
            name = name.rpartition(".")[0]
    members = frozenset(each for listed in recipe.allocation.values() for each in listed)
    if unknown := sorted(members - known):
        raise UsageError(f"recipe: allocation: {shown(unknown[0])} is no linear of the model: {again}")
    free = free_projections(blueprint, names, replace(recipe, allocation={}))
    chosen = Members(members)
    for projection in free:
        if not chosen.matches(projection.name):
            raise UsageError(f"recipe: allocation: has no scheme for {projection.name}: {again}")
    frame, taken = frame_of(checkpoint, blueprint, recipe, plan, {each.name for each in free})
    bits, nbytes = frame.bits(taken), frame.rest + taken
    if (recipe.target_bits, recipe.target_size) != (NONE, NONE) and taken > frame.budget(recipe):
        raise UsageError(
            f"recipe: allocation: takes {bits:.3f} bits a weight, {nbytes} bytes, more than the "
            f"{target_text(recipe)} asked for: {again}"
        )
    return bits, nbytes
