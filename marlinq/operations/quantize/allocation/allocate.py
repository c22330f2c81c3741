"""Measures the sensitivities of a model's units and chooses their schemes for a target."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from marlinq.calibration import Document, Duplicates, make_batches
from marlinq.checkpoint import Checkpoint
from marlinq.core.display import size_text
from marlinq.core.errors import UsageError
from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.core.settings import NONE
from marlinq.models import Blueprint, ModelInstance
from marlinq.operations.quantize.allocation.chosen import Allocation, Uniform, target_text
from marlinq.operations.quantize.allocation.knapsack import Item, choose
from marlinq.operations.quantize.allocation.sensitivity import MeasuringText, measure
from marlinq.operations.quantize.allocation.sizes import Frame, frame_of
from marlinq.operations.quantize.allocation.units import Unit, units_of
from marlinq.operations.quantize.budget import Work, measuring_tokens
from marlinq.operations.quantize.calibration_text import text_from_outside
from marlinq.operations.quantize.candidates import CANDIDATES
from marlinq.operations.quantize.numerics import compute_dtype, compute_products
from marlinq.operations.quantize.own_text import text_by_the_model
from marlinq.operations.quantize.planned_text import SELF, recipes_of_parts
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.spelling import spelled

_LONGEST_DOCUMENT = 512
"""tokens that documents for measuring are cut to"""
_BATCH_TOKENS = 2048
"""tokens per batch for measuring"""


@dataclass(frozen=True)
class Sensitivities:
    """The measured cost of every option of every unit.

    Attributes:
        units: groups of modules that get one scheme.
        costs: nats per token for each unit and each of its options, in their order.
        frame: sizes of the tensors that no choice changes.
        tokens: number of tokens that costs were measured on.
    """

    units: tuple[Unit, ...]
    costs: tuple[tuple[float, ...], ...]
    frame: Frame
    tokens: int

    def best(self, recipe: Recipe) -> Allocation:
        """The best choice for the target of ``recipe``; its other settings must be those of the measurement.

        Raises:
            UsageError: the target can't be reached; the message has the range that can.
        """
        choice = choose(
            [
                [Item(option.nbytes, cost) for option, cost in zip(unit.options, of_unit, strict=True)]
                for unit, of_unit in zip(self.units, self.costs, strict=True)
            ],
            _budget(recipe, self.units, self.frame),
        )
        if choice is None:
            raise AssertionError("_budget refuses targets below the smallest options")
        return Allocation(
            modules=with_choice(recipe, self.units, choice.items).allocation,
            target=target_text(recipe),
            bits=self.frame.bits(choice.nbytes),
            nbytes=self.frame.rest + choice.nbytes,
            kl=choice.cost,
            uniform=self._uniform(),
            units=len(self.units),
            tokens=self.tokens,
            step=choice.step,
            exact=choice.exact,
        )

    def _uniform(self) -> dict[str, Uniform]:
        by_scheme = {}
        for name in CANDIDATES:
            chosen = [
                (option.nbytes, cost)
                for unit, of_unit in zip(self.units, self.costs, strict=True)
                for option, cost in zip(unit.options, of_unit, strict=True)
                if option.candidate == name
            ]
            if len(chosen) == len(self.units):
                nbytes, kl = sum(size for size, _ in chosen), sum(cost for _, cost in chosen)
                by_scheme[name] = Uniform(self.frame.bits(nbytes), self.frame.rest + nbytes, kl)
        return by_scheme


def measure_sensitivities(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    recipe: Recipe,
    device: torch.device,
    *,
    plan_of: Callable[[Recipe], OutputPlan],
    trust_remote_code: bool,
    progress: ReportProgress,
    message: ReportMessage,
) -> Sensitivities:
    """Measures the cost of every option, after checking that the target can be reached.

    Args:
        checkpoint, blueprint: the source.
        recipe: recipe with a target and without an allocation.
        device: device that the model runs on.
        plan_of: function that plans the output of a recipe.
        trust_remote_code: run code that model or tokenizer bring.
        progress, message: callbacks of the run.

    Raises:
        UsageError: the target can't be reached; the message has the range that can.
        MarlinqError: text, model or machine don't allow the run.
    """
    units = units_of(checkpoint, blueprint, recipe)
    smallest = [min(range(len(unit.options)), key=lambda i: unit.options[i].nbytes) for unit in units]
    plan = plan_of(with_choice(recipe, units, smallest))
    free = {each.name for unit in units for each in unit.projections}
    frame, _ = frame_of(checkpoint, blueprint, recipe, plan, free)
    _budget(recipe, units, frame)
    documents = _documents(checkpoint, blueprint, recipe, device, trust_remote_code, progress, message)
    solved, weighed = (documents[::2], documents[1::2]) if len(documents) > 1 else (documents, documents)
    pad = not blueprint.routed
    text = MeasuringText(
        *(make_batches(part, token_budget=_BATCH_TOKENS, pad=pad) for part in (solved, weighed))
    )
    message(
        f"measuring what each of {sum(len(unit.options) for unit in units)} schemes of {len(units)} units "
        f"costs, by gradients of the loss on {text.tokens} tokens"
    )
    tokens = sum(map(len, documents))
    with tempfile.TemporaryDirectory(prefix="marlinq-") as folder:
        costs = measure(
            ModelInstance(
                blueprint, checkpoint, device=device, dtype=compute_dtype(checkpoint, plan, device, tokens)
            ),
            units,
            recipe,
            text,
            products=compute_products(plan, blueprint, device, tokens),
            folder=Path(folder),
            progress=progress,
        )
    return Sensitivities(units, tuple(map(tuple, costs)), frame, text.tokens)


def with_choice(recipe: Recipe, units: Sequence[Unit], chosen: Sequence[int]) -> Recipe:
    """``recipe`` with an allocation that gives unit i its option number ``chosen[i]``."""
    by_candidate: dict[str, list[str]] = {name: [] for name in CANDIDATES}
    for unit, index in zip(units, chosen, strict=True):
        by_candidate[unit.options[index].candidate] += unit.members
    return replace(
        recipe, allocation={name: tuple(members) for name, members in by_candidate.items() if members}
    )


def _budget(recipe: Recipe, units: Sequence[Unit], frame: Frame) -> int:
    """Bytes that all units together may take.

    Raises:
        UsageError: the smallest options don't fit the target, or the largest do.
    """
    least, most = (sum(pick(each.nbytes for each in unit.options) for unit in units) for pick in (min, max))
    budget = frame.budget(recipe)
    if recipe.target_bits != NONE:
        asked = f"{spelled('target_bits')} {recipe.target_bits:g}"
        ends = [frame.bits(size) for size in (least, most)]
        # Rounded inwards, so that both ends of the range in the message are reachable.
        reachable = f"{ends[0] + 0.0005:.3f} to {ends[1] - 0.0005:.3f} bits"
    else:
        sizes = [frame.rest + least, frame.rest + most - 1]
        asked = f"{spelled('target_size')} of {recipe.target_size} bytes"
        reachable = f"{sizes[0]} to {sizes[1]} bytes ({size_text(sizes[0])} to {size_text(sizes[1])})"
    if budget < least:
        raise UsageError(
            f"{asked}: too small for the schemes that {recipe.served_by} takes in {recipe.format}; reachable "
            f"are {reachable}{_wide(units)}"
        )
    if budget >= most:
        raise UsageError(
            f"{asked}: all modules fit unquantised, so nothing is left to choose; reachable are {reachable}"
        )
    return budget


def _wide(units: Sequence[Unit]) -> str:
    """Why units get no 4 bits, as the end of a message; empty where all may."""
    wide = {
        unit.name: reasons[-1]
        for unit in units
        if (reasons := [why for name, why in unit.refused.items() if name.startswith("int4")])
        and not any(option.candidate.startswith("int4") for option in unit.options)
    }
    if not wide:
        return ""
    name, reason = next(iter(wide.items()))
    more = f" (and {len(wide) - 1} more)" if len(wide) > 1 else ""
    return f"; {name}{more} gets no 4 bits: {reason}"


def _documents(
    checkpoint: Checkpoint,
    blueprint: Blueprint,
    recipe: Recipe,
    device: torch.device,
    trust_remote_code: bool,
    progress: ReportProgress,
    message: ReportMessage,
) -> list[Document]:
    """Short documents from the calibration's sources: one half for solves, the other for gradients."""
    work = Work.of(blueprint)
    tokens = 2 * measuring_tokens(work, device)
    if isinstance(recipe.tokens, int):
        tokens = min(tokens, recipe.tokens)
    length = min(work.longest(recipe), _LONGEST_DOCUMENT)
    recipe = recipe.replace(tokens=tokens, tune_steps=0, max_length=length)
    documents: list[Document] = []
    duplicates = Duplicates()
    for part in recipes_of_parts(recipe):
        if part.source == SELF:
            documents += text_by_the_model(
                checkpoint,
                blueprint,
                part.recipe,
                device,
                trust_remote_code=trust_remote_code,
                progress=progress,
                message=message,
            )
        else:
            documents += text_from_outside(
                part,
                checkpoint.path,
                blueprint.config,
                max_length=recipe.max_length,
                duplicates=duplicates,
                trust_remote_code=trust_remote_code,
            )
    return documents
