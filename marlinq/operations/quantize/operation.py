"""``marlinq.quantize``: a model in, a quantised checkpoint folder out."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import warnings
from collections import Counter
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from marlinq.calibration import Document
from marlinq.checkpoint import (
    DEFAULT_MAX_SHARD_BYTES,
    MANIFEST,
    Checkpoint,
    CheckpointWriter,
    CopyBehind,
    check_place,
)
from marlinq.checkpoint.reader import read_json
from marlinq.core import boundaries
from marlinq.core.devices import beside, multiplies_bfloat16, resolve_device, start_beside
from marlinq.core.dtypes import dtype_name, torch_dtype
from marlinq.core.errors import UsageError
from marlinq.core.progress import (
    Progress,
    ReportMessage,
    ReportProgress,
    messages_beside,
    no_message,
    no_progress,
    shows_progress,
)
from marlinq.core.version import __version__
from marlinq.methods.quantity import ErrorQuantity
from marlinq.models import Blueprint, ModelInstance, build_blueprint
from marlinq.operations.quantize.blocks import BlockQuantizer
from marlinq.operations.quantize.budget import Work
from marlinq.operations.quantize.clock import StageClock
from marlinq.operations.quantize.notes import check_notes, module_reports
from marlinq.operations.quantize.planning import OutputPlan, PlannedModule, plan_output, split_notes
from marlinq.operations.quantize.ranks import (
    FollowingWriter,
    Ranks,
    joined_ranks,
    own_batches,
    share_documents,
    share_state,
)
from marlinq.operations.quantize.recipe import UNQUANTIZED, Recipe
from marlinq.operations.quantize.report import QuantizeReport
from marlinq.operations.quantize.solves import try_solver
from marlinq.operations.quantize.text import (
    TextGatherer,
    add_drawn_anew,
    forget_written_text,
    longest,
    note_text,
    planned_text,
    writes_text,
)
from marlinq.operations.quantize.tuning import (
    NOTE,
    TuningSettings,
    check_head,
    draw_calibration,
    forget_tuning,
    hold_out,
    settings_that_fit,
    tune,
)
from marlinq.operations.quantize.watch import Watch
from marlinq.operations.report import CARD, TimeFigures, hub_id, model_card, write_report

# Places of a batch, padding included: enough to keep the device busy, little enough for its memory.
TOKEN_BUDGET = {"cpu": 2048, "cuda": 8192}
# Operations of a run's forward passes up to which a GPU computes in float32: 15 seconds of an H200, and a
# quarter of that for a method that is chosen for its speed.
_FLOAT32_WORK = 6e14
_QUICK_SHARE = 0.25
# The same for products on a CPU: ten seconds of two cores.
_CPU_FLOAT32_WORK = 1e12


@shows_progress
def quantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: Recipe | None = None,
    device: str = "auto",
    resume: bool = False,
    revision: str | None = None,
    max_shard_size: int = DEFAULT_MAX_SHARD_BYTES,
    trust_remote_code: bool = False,
    progress: Progress = True,
    message: ReportMessage | None = None,
) -> QuantizeReport:
    """Quantises a decoder-only language model, one decoder block at a time.

    Memory follows the largest decoder block, the statistics of its inputs and the calibration's hidden
    states, never the model; only calibration text that the model writes itself needs the whole model for a
    while. Blocks run in float32 on the CPU, and on a GPU unless that took long; a larger model runs in the
    checkpoint's own dtype there, and a CPU that multiplies bfloat16 faster rounds products of linear layers
    to it. The solve is float32. A method without calibration (round-to-nearest) reads no text and runs no
    block.

    Args:
        model: a local folder with safetensors weights, or a Hub id.
        out: the folder to create; ``<out>.partial`` while the run lasts.
        recipe: format, method, bits, calibration and so on; the defaults of :class:`Recipe` when None.
        device: ``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.
        resume: continue an interrupted run of the same recipe, model and machine; the result has the same
            bytes as an undisturbed run.
        revision: branch, tag or commit of a Hub id; the main branch when None.
        max_shard_size: bytes of tensor data a file of weights holds at most.
        trust_remote_code: run model code that the checkpoint brings.
        progress: True shows progress on stderr, False does not; or a function that is called with (what is
            being done, steps done, steps in all).
        message: called with a line before the model writes text, and now and then with a line on how the
            blocks come out and how tuning stands; None prints them on stderr where progress is shown.

    Raises:
        MarlinqError: one of its subclasses; see :mod:`marlinq.core.errors`.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    chosen = resolve_device(device)
    with joined_ranks(chosen) as ranks:
        return _quantize(
            model,
            Path(out),
            recipe or Recipe(),
            chosen,
            ranks,
            resume=resume,
            revision=revision,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
            progress=progress if ranks.first else no_progress,
            message=(message or messages_beside(progress)) if ranks.first else no_message,
        )


def _quantize(
    model: str | os.PathLike[str],
    out: Path,
    recipe: Recipe,
    chosen: torch.device,
    ranks: Ranks,
    *,
    resume: bool,
    revision: str | None,
    max_shard_size: int,
    trust_remote_code: bool,
    progress: ReportProgress,
    message: ReportMessage,
) -> QuantizeReport:
    progress = clock = StageClock(progress)
    starting = [start_beside(chosen)]
    checkpoint = Checkpoint.open(model, revision=revision, progress=progress)
    if ranks.first:
        check_place(out, resume=resume, source=checkpoint.path)
    blueprint = build_blueprint(
        checkpoint.config,
        source=str(checkpoint.path),
        tensors=checkpoint.tensors,
        trust_remote_code=trust_remote_code,
    )
    plan = plan_output(checkpoint, blueprint, recipe)
    if plan.automatic is not None:
        message(f"group size {plan.automatic.describe()}")
    if chosen.type == "cuda":
        # What goes wrong there goes wrong with the first layer too, and is said there.
        starting.append(beside(partial(try_solver, plan, chosen)))
    linears = [projection.name for projection in blueprint.projections()]
    if recipe.quantize_head != UNQUANTIZED and blueprint.head is not None:
        linears.append(blueprint.head)
    for override in recipe.unused_overrides(linears):
        warnings.warn(f"override {override.pattern!r} matches no linear of the model", stacklevel=2)
    for note in split_notes(blueprint, plan):
        warnings.warn(note, stacklevel=2)
    if not (plan.method.calibrated and plan.method.sequential) and _is_rotated(checkpoint):
        warnings.warn(
            f"{checkpoint.path}: was rotated, and {plan.method.name}, which sees channels one by one, loses "
            "by that; use gptq, or the model before its rotation",
            stacklevel=2,
        )
    heads = [] if plan.head is None else [plan.head]
    by_block = [members for block in blueprint.blocks if (members := plan.members(block))]
    texts = planned_text(recipe, checkpoint, blueprint, chosen) if plan.method.calibrated else []
    tokens = sum(text.tokens for text in texts)
    dtype = compute_dtype(checkpoint, plan, chosen, tokens)
    products = compute_products(plan, blueprint, chosen, tokens)
    work = Work.of(blueprint)
    tuning = (
        settings_that_fit(
            plan,
            TuningSettings.of(recipe, work, chosen, own_text=writes_text(recipe)),
            chosen,
            work.longest(recipe),
        )
        if recipe.tune_steps
        else None
    )
    if tuning is not None:
        check_head(blueprint, checkpoint.path)
    # All that can be wrong with the text is found before the output folder is begun.
    instance = ModelInstance(blueprint, checkpoint, device=chosen, dtype=dtype)
    config = blueprint.config
    if recipe.tune_steps and ranks.size > 1:
        raise UsageError(
            f"tuning runs in one process, found {ranks.size} ranks; start it without torchrun, or pass "
            "--tune-steps 0"
        )
    minded = any(plan.method.minds_outputs(each.options) for each in plan.modules.values())
    if minded and ranks.size > 1:
        raise UsageError(
            f"the loss's gradients are taken in one process, found {ranks.size} ranks; start it without "
            "torchrun, or pass --no-output-hessian"
        )
    if minded and blueprint.routed:
        warnings.warn(
            "tokens choose experts, so the loss's gradients are left out (--no-output-hessian)", stacklevel=2
        )
    calibrated = plan.method.calibrated or bool(recipe.tune_steps)
    max_length = longest(config, recipe) if calibrated else 0
    gatherer = TextGatherer(
        checkpoint,
        blueprint,
        recipe,
        chosen,
        max_length=max_length,
        trust_remote_code=trust_remote_code,
        progress=progress,
        message=message,
    )
    if calibrated and ranks.first:
        gatherer.prepare(resume=resume)
    if chosen.type == "cuda":
        # A solve sets for the whole process how products are rounded, so nothing else multiplies beside it.
        wait(starting)
        # A process that has not used the GPU has no statistics to reset.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats(chosen)
    environment = _environment(chosen, dtype, products)
    # Nothing is begun for others that don't come.
    ranks.meet()
    writer: CheckpointWriter | None = None
    if ranks.first:
        writer = CheckpointWriter(
            out,
            plan.tensors,
            fingerprint=_fingerprint(checkpoint, recipe, environment, max_shard_size),
            max_shard_bytes=max_shard_size,
            resume=resume,
        )
        check_notes(writer)
    state = share_state(writer, ranks)
    writer = writer or FollowingWriter(out, state)
    copied = plan.copied if ranks.first else ()
    with writer, CopyBehind(checkpoint, writer, copied, progress) as copying:
        if resume and ranks.first and not writer.resumed:
            warnings.warn(f"{writer.partial}: no unfinished run to resume; starting afresh", stacklevel=2)
        resumed = sum(1 for members in by_block if _all_written(plan, members, writer))
        clock.mark("preparing")
        unsolved = resumed < len(by_block) or not _all_written(plan, heads, writer)
        untuned = tuning is not None and NOTE not in writer.notes
        documents: list[Document] | None = None
        learning: list[Document] = []
        held_out: list[Document] = []
        if calibrated and (unsolved or untuned):
            text = gatherer.gather(writer) if ranks.first else None
            if text is not None and tuning is not None:
                learning, held_out = hold_out([*text.documents, *text.tuned])
                drawing = partial(
                    draw_calibration,
                    instance,
                    learning,
                    tuning,
                    max_length=max_length,
                    folder=writer.partial,
                    progress=progress,
                )
                add_drawn_anew(writer, text, recipe, drawing)
            documents = share_documents(None if text is None else text.documents, ranks)
            if text is not None:
                note_text(writer, recipe, text)
            # Nor does the quantiser see what is held out: its codes fit what it saw better than any other
            # text, and there hardly anything that is learnt later would look like a gain.
            unseen = set(held_out)
            documents = [each for each in documents if each not in unseen]
        if unsolved:
            batches = []
            if plan.method.calibrated and documents is not None:
                batches = own_batches(
                    documents, ranks, token_budget=TOKEN_BUDGET[chosen.type], pad=not blueprint.routed
                )
            watch = Watch(progress, message, writer)
            BlockQuantizer(instance, plan, writer, batches, recipe, watch, ranks, products).run()
        copying.finish()
        if tuning is not None and untuned and learning:
            tune(
                checkpoint,
                blueprint,
                plan,
                writer,
                learning,
                held_out,
                tuning,
                max_length=max_length,
                device=chosen,
                progress=progress,
                message=message,
            )
        checkpoint.check_unchanged()
        forget_written_text(writer)
        forget_tuning(writer)
        manifest = _manifest(checkpoint, recipe, plan, environment)
        folder = writer.finish(
            config=plan.config,
            manifest=manifest,
            side_files_from=checkpoint,
            extra_json=plan.extra_json,
            extra_text=_card(model, checkpoint, plan, manifest, writer),
        )
    clock.mark("finishing the folder")
    if ranks.first:
        _write_report(folder, clock, environment["device"], ranks.size)
    return QuantizeReport(
        out=folder,
        format=plan.layout.name,
        method=plan.method.name,
        modules=module_reports(writer.notes),
        kept=plan.kept,
        head=None if plan.head is None else plan.head.stored,
        calibration=writer.notes.get("calibration"),
        quality=recipe.quality_record(),
        tuning=writer.notes.get(NOTE),
        device=str(chosen),
        dtype=described_dtype(dtype, products),
        blocks=len(by_block),
        resumed_blocks=resumed,
        source_bytes=checkpoint.nbytes,
        output_bytes=sum(tensor.nbytes for tensor in plan.tensors),
        seconds=clock.total,
        peak_host_bytes=_peak_host_bytes(),
        peak_device_bytes=torch.cuda.max_memory_allocated(chosen) if chosen.type == "cuda" else None,
    )


def _is_rotated(checkpoint: Checkpoint) -> bool:
    """Whether ``marlinq rotate`` wrote the source."""
    if not (checkpoint.path / MANIFEST).exists():
        return False
    return bool(read_json(checkpoint.path, MANIFEST).get("operation") == "rotate")


def compute_dtype(checkpoint: Checkpoint, plan: OutputPlan, device: torch.device, tokens: int) -> torch.dtype:
    """The dtype that blocks run in on a calibration of ``tokens`` tokens.

    float32 on the CPU, where other operations than products are slow in 16 bits. On a GPU too while that
    takes seconds, so that both lead to the same result; a larger model runs in the checkpoint's own dtype
    there.
    """
    share = 1.0 if plan.method.sequential else _QUICK_SHARE
    if device.type == "cpu" or _forward_work(plan, tokens) <= share * _FLOAT32_WORK:
        return torch.float32
    first = next(iter(plan.modules.values()))
    return torch_dtype(checkpoint.tensors[first.source].dtype)


def compute_products(
    plan: OutputPlan, blueprint: Blueprint, device: torch.device, tokens: int
) -> torch.dtype | None:
    """What the products of linear layers are rounded to where blocks run in float32; None for nothing.

    bfloat16 on a CPU that has instructions for it, unless float32 takes seconds only. Not where tokens choose
    experts: rounding would send some of them to others.
    """
    if _forward_work(plan, tokens) <= _CPU_FLOAT32_WORK or blueprint.routed:
        return None
    return torch.bfloat16 if multiplies_bfloat16(device) else None


def described_dtype(dtype: torch.dtype, products: torch.dtype | None) -> str:
    """``float32``, or ``float32 with products in bfloat16``."""
    return dtype_name(dtype) + ("" if products is None else f" with products in {dtype_name(products)}")


def _forward_work(plan: OutputPlan, tokens: int) -> int:
    """Two forward passes, a multiplication and an addition for each weight and token."""
    projections = [planned.projection for planned in plan.modules.values()]
    return 4 * tokens * sum(each.in_features * each.out_features for each in projections)


def _environment(device: torch.device, dtype: torch.dtype, products: torch.dtype | None) -> dict[str, Any]:
    """What besides the recipe and the model can change a bit of the result."""
    return {
        "marlinq": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": described_dtype(dtype, products),
        "threads": torch.get_num_threads(),
    }


def _fingerprint(
    checkpoint: Checkpoint, recipe: Recipe, environment: dict[str, Any], max_shard_size: int
) -> str:
    if environment["device"] != "cpu":
        # How many threads there are decides how sums are split on a CPU; torchrun changes it.
        environment = {key: value for key, value in environment.items() if key != "threads"}
    # A quality's version stands for what its settings mean, which is not all in the recipe.
    parts = [recipe.to_dict(), recipe.quality_record(), checkpoint.state(), environment, max_shard_size]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _manifest(
    checkpoint: Checkpoint, recipe: Recipe, plan: OutputPlan, environment: dict[str, Any]
) -> dict[str, Any]:
    head = {} if plan.head is None else {"head": {"module": plan.head.stored, "untied": plan.untied}}
    return {
        "tool": f"marlinq {__version__}",
        "operation": "quantize",
        "source": {"name": checkpoint.path.name, "identity": checkpoint.identity()},
        "recipe": recipe.to_dict(),
        "quality": recipe.quality_record(),
        "environment": environment,
        "kept": {name: keep.reason for name, keep in plan.kept.items()},
        **head,
    }


def _card(
    model: str | os.PathLike[str],
    checkpoint: Checkpoint,
    plan: OutputPlan,
    manifest: dict[str, Any],
    writer: CheckpointWriter,
) -> dict[str, str]:
    """The model card under its file name; empty where it could not be made, which is only told."""
    made = {}
    with boundaries.decoration("no model card was written", "write one before you publish the checkpoint"):
        modules = module_reports(writer.notes)
        made[CARD] = model_card(
            checkpoint,
            base_model=hub_id(os.fspath(model), checkpoint),
            recipe=manifest["recipe"],
            tool=manifest["tool"],
            schemes=Counter(module.scheme for module in modules.values()),
            errors={
                quantity.label: {
                    name: module.relative_error
                    for name, module in modules.items()
                    if module.quantity == quantity
                }
                for quantity in ErrorQuantity
            },
            calibration=writer.notes.get("calibration"),
            nbytes=sum(tensor.nbytes for tensor in plan.tensors),
        )
    return made


def _write_report(folder: Path, clock: StageClock, device: str, ranks: int) -> None:
    """Writes the report; the checkpoint is whole without it, so a failure is only told."""
    time = TimeFigures(clock.stages, tuple(clock.blocks), clock.total, device, ranks)
    with boundaries.decoration("no report was written", f"marlinq report {folder} makes one"):
        write_report(folder, time)


def _all_written(plan: OutputPlan, members: list[PlannedModule], writer: CheckpointWriter) -> bool:
    written = writer.written
    return all(plan.is_written(planned, written, writer.notes) for planned in members)


def _peak_host_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kilobytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
