"""The third stage of a quantise run: quantises all modules, and tunes them where the recipe asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from marlinq.core.progress import ReportMessage, ReportProgress
from marlinq.operations.quantize.blocks import BlockQuantizer
from marlinq.operations.quantize.gather_text import RunText
from marlinq.operations.quantize.journal_notes import module_reports
from marlinq.operations.quantize.prepare import PreparedRun
from marlinq.operations.quantize.quantize_report import ModuleReport
from marlinq.operations.quantize.ranks import own_batches
from marlinq.operations.quantize.tuning import NOTE, TuningRun, tune
from marlinq.operations.quantize.unfinished_output import Output
from marlinq.operations.quantize.watch import Watch

TOKEN_BUDGET = {"cpu": 2048, "cuda": 8192}
"""tokens per batch with padding, by kind of device: enough to keep it busy, few enough for its memory"""


@dataclass(frozen=True)
class Solved:
    """The results of all solves and of tuning.

    Attributes:
        modules: report of each quantised module by stored name.
        calibration: identity of the calibration text; None for a method without calibration.
        tuning: report of tuning; None without tuning.
    """

    modules: Mapping[str, ModuleReport]
    calibration: Mapping[str, Any] | None
    tuning: Mapping[str, Any] | None


def solve(
    prepared: PreparedRun, text: RunText, output: Output, *, progress: ReportProgress, message: ReportMessage
) -> Solved:
    """Quantises the modules that are not written yet, then tunes; afterwards every tensor is written.

    Raises:
        NumericsError: numbers are not finite, or a module's error is far above round-to-nearest's.
        CheckpointError: the source changed during the run.
    """
    decisions, writer, ranks = prepared.decisions, output.writer, prepared.ranks
    if output.unsolved:
        batches = []
        if decisions.plan.method.calibrated:
            batches = own_batches(
                text.calibration,
                ranks,
                token_budget=TOKEN_BUDGET[decisions.device.type],
                pad=not decisions.blueprint.routed,
            )
        watch = Watch(progress, message, writer)

        def watched(stage: str, done: int, total: int) -> None:
            # A source that can't be copied ends the run now and not after its last block.
            output.copying.check()
            watch(stage, done, total)

        BlockQuantizer(
            prepared.instance,
            decisions.plan,
            writer,
            batches,
            decisions.recipe,
            watched,
            ranks,
            decisions.products,
        ).run()
    output.copying.finish()
    if output.untuned and text.tuning is not None and text.learning:
        begin = partial(
            TuningRun,
            decisions.checkpoint,
            decisions.blueprint,
            decisions.plan,
            writer,
            text.learning,
            text.held_out,
            text.tuning,
            max_length=prepared.max_length,
            device=decisions.device,
            progress=progress,
            message=message,
        )
        tune(writer, decisions.device, begin)
    decisions.checkpoint.check_unchanged()
    notes = writer.notes
    return Solved(module_reports(notes), notes.get("calibration"), notes.get(NOTE))
