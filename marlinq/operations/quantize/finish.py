"""The last stage of a quantise run: writes config, manifest, model card and report."""

from __future__ import annotations

import os
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from marlinq.checkpoint.manifest import manifest_of, source_of
from marlinq.core import boundaries
from marlinq.core.settings import AUTO
from marlinq.methods.quantity import ErrorQuantity
from marlinq.operations.inspect.servers import loads
from marlinq.operations.quantize.allocation.stored_allocation import forget_allocation
from marlinq.operations.quantize.calibration_text import forget_written_text
from marlinq.operations.quantize.clock import StageClock
from marlinq.operations.quantize.numerics import described_dtype
from marlinq.operations.quantize.prepare import Decisions, PreparedRun
from marlinq.operations.quantize.quantize_report import QuantizeReport
from marlinq.operations.quantize.solve import Solved
from marlinq.operations.quantize.tuning import forget_tuning
from marlinq.operations.quantize.unfinished_output import Output
from marlinq.operations.report import CARD, TimeFigures, hub_id, model_card, write_report


def finish(model: str | os.PathLike[str], prepared: PreparedRun, solved: Solved, output: Output) -> Path:
    """Writes the files beside the tensors, renames the unfinished folder, and returns its final path.

    Args:
        model: source as the user named it, for the model card.
        prepared, solved, output: results of the earlier stages.
    """
    decisions, writer = prepared.decisions, output.writer
    forget_written_text(writer)
    forget_tuning(writer)
    forget_allocation(writer)
    manifest = _manifest(prepared)
    return writer.finish(
        config=decisions.plan.config,
        manifest=manifest,
        side_files_from=decisions.checkpoint,
        extra_json=decisions.plan.extra_json,
        extra_text=_card(model, prepared, solved, manifest),
    )


def run_report(
    folder: Path, prepared: PreparedRun, solved: Solved, output: Output, *, seconds: float
) -> QuantizeReport:
    """The report of a run that took ``seconds`` and wrote ``folder``."""
    decisions = prepared.decisions
    plan, device = decisions.plan, decisions.device
    return QuantizeReport(
        out=folder,
        format=plan.format.name,
        method=plan.method.name,
        modules=solved.modules,
        kept=plan.kept,
        head=None if plan.head is None else plan.head.stored,
        calibration=solved.calibration,
        quality=decisions.recipe.quality_record(),
        tuning=solved.tuning,
        device=str(device),
        dtype=described_dtype(decisions.dtype, decisions.products),
        blocks=output.blocks,
        resumed_blocks=output.resumed_blocks,
        source_bytes=decisions.checkpoint.nbytes,
        output_bytes=_output_bytes(prepared),
        seconds=seconds,
        peak_host_bytes=_peak_host_bytes(),
        allocation=decisions.allocation,
        peak_device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def write_run_report(folder: Path, clock: StageClock, device: str, ranks: int) -> None:
    """Writes the HTML report. The checkpoint is complete without it, so a failure is only a warning."""
    time = TimeFigures(clock.stages, tuple(clock.blocks), clock.total, device, ranks)
    with boundaries.decoration("no report was written", f"marlinq report {folder} makes one"):
        write_report(folder, time)


def _manifest(prepared: PreparedRun) -> dict[str, Any]:
    decisions = prepared.decisions
    plan, recipe, checkpoint = decisions.plan, decisions.recipe, decisions.checkpoint
    head = {} if plan.head is None else {"head": {"module": plan.head.stored, "untied": plan.untied}}
    return manifest_of(
        "quantize",
        source=source_of(checkpoint),
        recipe=recipe.to_dict(),
        quality=recipe.quality_record(),
        environment=dict(prepared.environment),
        **({} if decisions.allocation is None else {"allocation": decisions.allocation.record()}),
        kept={name: keep.reason for name, keep in plan.kept.items()},
        **head,
    )


def _card(
    model: str | os.PathLike[str], prepared: PreparedRun, solved: Solved, manifest: dict[str, Any]
) -> dict[str, str]:
    """File name -> text of the model card; empty where it can't be made, which is only a warning."""
    made = {}
    checkpoint = prepared.decisions.checkpoint
    with boundaries.decoration("no model card was written", "write one before you publish the checkpoint"):
        made[CARD] = model_card(
            checkpoint,
            base_model=hub_id(os.fspath(model), checkpoint),
            recipe=manifest["recipe"] | amount_of_text(prepared.decisions),
            tool=manifest["tool"],
            schemes=Counter(module.scheme for module in solved.modules.values()),
            errors={
                quantity.label: {
                    name: module.relative_error
                    for name, module in solved.modules.items()
                    if module.quantity == quantity
                }
                for quantity in ErrorQuantity
            },
            calibration=solved.calibration,
            tuning=solved.tuning,
            nbytes=_output_bytes(prepared),
            vllm=loads("vLLM", str(manifest["recipe"]["format"])),
        )
    return made


def amount_of_text(decisions: Decisions) -> dict[str, int]:
    """The setting ``tokens`` for the amount of text that device and threads decided; empty where the recipe
    says it, or where tuning has an amount of its own."""
    recipe, budgets = decisions.recipe, [text.budget for text in decisions.texts]
    if recipe.tokens != AUTO or recipe.samples != AUTO or decisions.tuning is not None:
        return {}
    return {"tokens": budgets[0].tokens} if len(budgets) == 1 and budgets[0] is not None else {}


def _output_bytes(prepared: PreparedRun) -> int:
    return sum(tensor.nbytes for tensor in prepared.decisions.plan.tensors)


def _peak_host_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kilobytes, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
