"""``marlinq.quantize``: a model in, a quantised checkpoint folder out, in four stages.

prepare      config and headers -> Prepared: every decision, and text from outside
gather_text  Prepared           -> RunText: documents to calibrate on, to learn from, to hold out
solve        Prepared, RunText  -> Solved: quantised and tuned modules, in the unfinished folder
finish       Prepared, Solved   -> the finished folder with manifest, card and report
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marlinq.checkpoint import DEFAULT_MAX_SHARD_BYTES
from marlinq.core.devices import resolve_device
from marlinq.core.progress import (
    Progress,
    ReportMessage,
    messages_beside,
    no_message,
    no_progress,
    shows_progress,
)
from marlinq.operations.little_memory import tells_of_little_memory
from marlinq.operations.quantize.clock import StageClock
from marlinq.operations.quantize.finish import finish, run_report, write_run_report
from marlinq.operations.quantize.finished import finished_run
from marlinq.operations.quantize.gather_text import gather_text
from marlinq.operations.quantize.prepare import prepare
from marlinq.operations.quantize.quantize_report import QuantizeReport
from marlinq.operations.quantize.ranks import joined_ranks
from marlinq.operations.quantize.recipe import Recipe, as_recipe
from marlinq.operations.quantize.solve import solve
from marlinq.operations.quantize.unfinished_output import open_output


@shows_progress
@tells_of_little_memory("choose another device, fewer calibration tokens or shorter documents")
def quantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    recipe: Recipe | Mapping[str, Any] | None = None,
    device: str = "auto",
    resume: bool = False,
    revision: str | None = None,
    max_shard_size: int = DEFAULT_MAX_SHARD_BYTES,
    trust_remote_code: bool = False,
    progress: Progress = True,
    message: ReportMessage | None = None,
) -> QuantizeReport:
    """Quantises a decoder-only language model, one decoder block at a time.

    Memory holds the largest decoder block, the statistics of its inputs and the hidden states of the
    calibration text. The whole model is in memory only while it writes calibration text.

    Blocks run in float32, with two exceptions: on a GPU a large model runs in the checkpoint's dtype, and a
    CPU that has bfloat16 instructions multiplies linear layers in bfloat16. Solves are float32. A method
    without calibration (round-to-nearest) reads no text and runs no block.

    Args:
        model: local folder with safetensors weights, or a Hub id.
        out: folder to create; it is named ``<out>.partial`` while the run lasts.
        recipe: format, method, bits, calibration and further settings, as a :class:`Recipe` or a dict; its
            defaults when None.
        device: ``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:N``.
        resume: continue an interrupted run of the same recipe, model and machine; the result has the same
            bytes as that of an uninterrupted run. If the run is finished already, its report is returned.
        revision: branch, tag or commit of a Hub id; the main branch when None.
        max_shard_size: bytes of tensor data in the largest file of weights.
        trust_remote_code: run model code that the checkpoint brings.
        progress: True shows progress on stderr, False shows none; a function is called with (activity, steps
            done, steps in all).
        message: called with one line before the model writes text, and from time to time with one line on
            the error of finished blocks and the state of tuning; None prints them on stderr where progress is
            shown.

    Raises:
        MarlinqError: any of its subclasses; see :mod:`marlinq.core.errors`.
    """
    assert not isinstance(progress, bool)  # the decorator made it a function
    recipe = as_recipe(recipe)
    if resume:
        finished = finished_run(
            model,
            Path(out),
            recipe,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
        if finished is not None:
            (message or messages_beside(progress))(f"{out}: this run is finished; nothing is left to do")
            return finished
    chosen = resolve_device(device)
    with joined_ranks(chosen) as ranks:
        clock = StageClock(progress if ranks.first else no_progress)
        told = (message or messages_beside(progress)) if ranks.first else no_message
        prepared = prepare(
            model,
            Path(out),
            recipe,
            chosen,
            ranks,
            resume=resume,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=clock,
            message=told,
        )
        with open_output(
            prepared, Path(out), resume=resume, max_shard_size=max_shard_size, progress=clock
        ) as output:
            clock.mark("preparing")
            text = gather_text(prepared, output, progress=clock)
            solved = solve(prepared, text, output, progress=clock, message=told)
            folder = finish(model, prepared, solved, output)
        clock.mark("finishing the folder")
        if ranks.first:
            write_run_report(folder, clock, prepared.environment["device"], ranks.size)
        return run_report(folder, prepared, solved, output, seconds=clock.total)
