"""The first stage of a quantise run: every decision that is made before weights are read.

``--plan`` makes the same :class:`Decisions` and reports them; a run continues to :class:`PreparedRun`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from marlinq.checkpoint import MANIFEST, Checkpoint, check_place, dequantized, with_dense_weights
from marlinq.checkpoint.reader import read_json
from marlinq.core.devices import beside, start_beside
from marlinq.core.errors import CheckpointError, UsageError
from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.models import (
    Blueprint,
    ModelInstance,
    build_blueprint,
    converted,
    find_conversions,
    without_false_ties,
)
from marlinq.operations.quantize.allocation.allocate import measure_sensitivities
from marlinq.operations.quantize.allocation.chosen import Allocation
from marlinq.operations.quantize.allocation.sizes import check_allocation
from marlinq.operations.quantize.allocation.stored_allocation import kept_allocation
from marlinq.operations.quantize.allocation.units import fuses
from marlinq.operations.quantize.budget import Work
from marlinq.operations.quantize.calibration_text import TextGatherer
from marlinq.operations.quantize.loaders import loader_notes
from marlinq.operations.quantize.numerics import compute_dtype, compute_products, environment_of
from marlinq.operations.quantize.plan_notes import fused_notes, split_notes
from marlinq.operations.quantize.planned_text import PlannedText, longest, planned_text, writes_text
from marlinq.operations.quantize.planning import OutputPlan, plan_output
from marlinq.operations.quantize.ranks import Ranks
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.recipe_settings import UNQUANTIZED
from marlinq.operations.quantize.solves import try_solver
from marlinq.operations.quantize.spelling import spelled
from marlinq.operations.quantize.tuning import TuningSettings, check_head, settings_that_fit
from marlinq.operations.quantize.unused_settings import changed_settings
from marlinq.runtime.loading import match_tensors


@dataclass(frozen=True)
class Decisions:
    """Everything that config, headers and recipe decide about a run.

    Attributes:
        checkpoint: the source, with its tensors named and shaped as the model has them.
        blueprint: structure of the model.
        recipe: settings of the run.
        device: device that blocks run on.
        plan: every output tensor.
        texts: calibration text to take from each source; empty for a method without calibration.
        dtype: dtype that blocks run in.
        products: dtype that linear layers multiply in; None for ``dtype``.
        work: work per token of the model.
        tuning: settings of tuning; None without tuning.
        allocation: schemes chosen for the recipe's target in this run or in the one that it resumes; None
            where the recipe has no target or already names the chosen schemes.
    """

    checkpoint: Checkpoint
    blueprint: Blueprint
    recipe: Recipe
    device: torch.device
    plan: OutputPlan
    texts: tuple[PlannedText, ...]
    dtype: torch.dtype
    products: torch.dtype | None
    work: Work
    tuning: TuningSettings | None
    allocation: Allocation | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the calibration text, at most."""
        return sum(text.tokens for text in self.texts)

    @property
    def calibrated(self) -> bool:
        """Whether any stage reads text."""
        return self.plan.method.calibrated or self.tuning is not None

    @property
    def uses_output_gradients(self) -> bool:
        """Whether the method of any module uses the gradients of the loss at its outputs."""
        return any(each.method.uses_output_gradients(each.options) for each in self.plan.modules.values())


@dataclass(frozen=True)
class PreparedRun:
    """Everything that a run needs before it writes its first file.

    Attributes:
        decisions: plan and settings of the run.
        ranks: processes that share the run.
        instance: the loaded model, without any weights in memory.
        gatherer: gathers the calibration text; text from files and datasets has been read already.
        max_length: tokens that a document is cut to; 0 where no text is used.
        environment: versions, device, dtypes and threads.
    """

    decisions: Decisions
    ranks: Ranks
    instance: ModelInstance
    gatherer: TextGatherer
    max_length: int
    environment: Mapping[str, Any]


def open_source(
    model: str | os.PathLike[str], *, revision: str | None, progress: ReportProgress | None = None
) -> Checkpoint:
    """The source of a run; a quantised one is read with dense weights, and a warning.

    Raises:
        CheckpointError: the checkpoint is damaged or not found.
        UnsupportedError: marlinq does not read its format or its kind of quantisation.
    """
    opened = with_dense_weights(Checkpoint.open(model, revision=revision, progress=progress))
    dense = dequantized(opened)
    if dense is not opened:
        warnings.warn(
            f"{opened.path}: is quantised already; its weights are dequantised, block by block, and "
            "quantised again; what the first quantisation lost stays lost",
            stacklevel=4,
        )
    return dense


def plan_run(
    checkpoint: Checkpoint,
    recipe: Recipe,
    device: torch.device,
    *,
    trust_remote_code: bool,
    progress: ReportProgress,
    message: ReportMessage,
    allocation: Allocation | None = None,
) -> Decisions:
    """Decides how ``checkpoint`` is quantised; warns about schemes that servers load badly or not at all.

    Where the recipe has a size or quality target and no ``allocation`` is given, the model is run on the
    device to choose each module's scheme.

    Raises:
        MarlinqError: model and recipe don't go together, or an override matches nothing.
    """
    blueprint = build_blueprint(
        checkpoint.config,
        source=str(checkpoint.path),
        tensors=checkpoint.tensors,
        trust_remote_code=trust_remote_code,
    )
    conversions = find_conversions(blueprint, checkpoint.tensors, source=str(checkpoint.path))
    stored, checkpoint = checkpoint, converted(checkpoint, conversions)
    blueprint = without_false_ties(blueprint, checkpoint)
    _check_overrides(blueprint, recipe)
    plan_of = partial(plan_output, checkpoint, blueprint, stored=stored, conversions=conversions)
    if recipe.wants_allocation:
        if allocation is None:
            allocation = measure_sensitivities(
                *(checkpoint, blueprint, recipe, device),
                plan_of=plan_of,
                trust_remote_code=trust_remote_code,
                progress=progress,
                message=message,
            ).best(recipe)
        recipe = replace(recipe, allocation=allocation.modules)
    plan = plan_of(recipe)
    if recipe.allocation:
        bits, nbytes = check_allocation(checkpoint, blueprint, recipe, plan)
        # Bits and bytes are counted again: an allocation read from an interrupted run may hold other values.
        allocation = allocation and replace(allocation, bits=bits, nbytes=nbytes)
    notes = [
        *_unknown_tensors(stored, blueprint),
        *_notes(checkpoint, blueprint, recipe, plan),
        *loader_notes(checkpoint, recipe, plan, plan_of),
    ]
    for note in notes:
        warnings.warn(note, stacklevel=3)
    texts = planned_text(recipe, checkpoint, blueprint, device) if plan.method.calibrated else []
    tokens = sum(text.tokens for text in texts)
    work = Work.of(blueprint)
    tuning = None
    if recipe.tune_steps:
        wanted = TuningSettings.of(recipe, work, device, own_text=writes_text(recipe))
        tuning = settings_that_fit(plan, wanted, device, work.longest(recipe))
        check_head(blueprint, checkpoint.path)
    return Decisions(
        checkpoint=checkpoint,
        blueprint=blueprint,
        recipe=recipe,
        device=device,
        plan=plan,
        texts=tuple(texts),
        dtype=compute_dtype(checkpoint, plan, device, tokens),
        products=compute_products(plan, blueprint, device, tokens),
        work=work,
        tuning=tuning,
        allocation=allocation,
    )


def prepare(
    model: str | os.PathLike[str],
    out: Path,
    recipe: Recipe,
    device: torch.device,
    ranks: Ranks,
    *,
    resume: bool,
    revision: str | None,
    trust_remote_code: bool,
    progress: ReportProgress,
    message: ReportMessage,
) -> PreparedRun:
    """Does everything that can fail before the output folder is created.

    Args:
        model: folder or Hub id.
        out: folder that will be created.
        recipe: settings of the run.
        device: device that blocks run on.
        ranks: processes that share the run.
        resume, revision, trust_remote_code, progress, message: as for
            :func:`~marlinq.operations.quantize.quantize`.

    Raises:
        MarlinqError: model, recipe, text and machine don't go together.
    """
    starting = [start_beside(device)]
    checkpoint = open_source(model, revision=revision, progress=progress)
    if ranks.first:
        check_place(out, resume=resume, source=checkpoint.path)
    if recipe.wants_allocation and ranks.size > 1:
        raise UsageError(
            f"{spelled('target_bits')}, {spelled('target_size')}: schemes are chosen in one process, found "
            f"{ranks.size} ranks; "
            "run --plan --json without torchrun, and pass its allocation's modules as the recipe's allocation"
        )
    decisions = plan_run(
        checkpoint,
        recipe,
        device,
        trust_remote_code=trust_remote_code,
        progress=progress,
        message=message,
        allocation=kept_allocation(out, recipe) if resume and recipe.wants_allocation else None,
    )
    recipe = decisions.recipe
    checkpoint, blueprint, plan = decisions.checkpoint, decisions.blueprint, decisions.plan
    if plan.automatic is not None:
        message(f"group size {plan.automatic.describe()}")
    if device.type == "cuda":
        # Warms up the solver in a thread; an error there is dropped, since the first layer raises it again.
        starting.append(beside(partial(try_solver, plan, device)))
    _check_ranks(decisions, ranks)
    instance = ModelInstance(blueprint, checkpoint, device=device, dtype=decisions.dtype)
    max_length = longest(blueprint.config, recipe) if decisions.calibrated else 0
    gatherer = TextGatherer(
        checkpoint,
        blueprint,
        recipe,
        device,
        max_length=max_length,
        trust_remote_code=trust_remote_code,
        progress=progress,
        message=message,
    )
    if decisions.calibrated and ranks.first:
        gatherer.prepare(resume=resume)
    if device.type == "cuda":
        # A solve sets the rounding of products for the whole process, so nothing may multiply beside it.
        wait(starting)
        # Memory statistics can be reset only after CUDA is initialised.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(device)
    # Fails here, before any file is written, if other ranks don't answer.
    ranks.meet()
    environment = environment_of(device, decisions.dtype, decisions.products)
    return PreparedRun(decisions, ranks, instance, gatherer, max_length, environment)


def _check_overrides(blueprint: Blueprint, recipe: Recipe) -> None:
    """Refuses an override that matches no linear: its modules would be quantised as all others are.

    Raises:
        UsageError: it names the override and linears of the model.
    """
    linears = [projection.name for projection in blueprint.projections()]
    if recipe.quantize_head != UNQUANTIZED and blueprint.head is not None:
        linears.append(blueprint.head)
    for override in recipe.unused_overrides(linears):
        decided = next(filter(override.matches, linears), None)
        if decided is not None:
            raise UsageError(
                f"override {override.pattern!r}: earlier overrides decide all linears that it matches, such "
                f"as {decided}; the first match wins, so put it before them or leave it out"
            )
        raise UsageError(
            f"override {override.pattern!r}: matches no linear of the model, whose names are like "
            f"{linears[0]}; correct it or leave it out"
        )


def _unknown_tensors(stored: Checkpoint, blueprint: Blueprint) -> list[str]:
    """A warning about tensors that the model does not have, which a run copies."""
    try:
        match_tensors(blueprint, stored, None)
    except CheckpointError as refusal:
        return [f"{refusal}; marlinq will not load the output either"]
    return []


def _notes(checkpoint: Checkpoint, blueprint: Blueprint, recipe: Recipe, plan: OutputPlan) -> list[str]:
    """Warnings about settings that do nothing or make servers load the output badly."""
    notes = split_notes(blueprint, plan)
    if not (recipe.allocation and not fuses(recipe.served_by)):
        notes += fused_notes(blueprint, plan)
    if not (plan.method.calibrated and plan.method.sequential) and _is_rotated(checkpoint):
        notes.append(
            f"{checkpoint.path}: was rotated, which makes {plan.method.name} worse; use --method gptq, or "
            "quantise the model before its rotation"
        )
    if not blueprint.routed and (idle := changed_settings(recipe, ("experts", "expert_fallback"))):
        named = ", ".join(map(spelled, idle))
        notes.append(f"{named}: no effect, because the model has no experts")
    if blueprint.routed and any(
        each.method.uses_output_gradients(each.options) for each in plan.modules.values()
    ):
        notes.append(
            f"{spelled('output_hessian')} is left out, because the model is a mixture of experts",
        )
    return notes


def _check_ranks(decisions: Decisions, ranks: Ranks) -> None:
    """Refuses several processes where one does the work alone.

    Raises:
        UsageError: the run is tuned, or takes the loss's gradients.
    """
    if ranks.size == 1:
        return
    if decisions.tuning is not None:
        raise UsageError(
            f"tuning: runs in one process, found {ranks.size} ranks; start it without torchrun, or pass "
            "--tune-steps 0"
        )
    if decisions.uses_output_gradients:
        raise UsageError(
            f"{spelled('output_hessian')}: runs in one process, found {ranks.size} ranks; start it without "
            "torchrun, or pass --no-output-hessian"
        )


def _is_rotated(checkpoint: Checkpoint) -> bool:
    """Whether ``marlinq rotate`` wrote the source."""
    if not (checkpoint.path / MANIFEST).exists():
        return False
    return bool(read_json(checkpoint.path, MANIFEST).get("operation") == "rotate")
