"""The second stage of a quantise run: gathers the text for calibration and tuning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from marlinq.calibration import Document
from marlinq.core.errors import UsageError
from marlinq.core.progress import ReportProgress
from marlinq.operations.quantize.calibration_text import add_drawn_anew, note_text
from marlinq.operations.quantize.prepare import PreparedRun
from marlinq.operations.quantize.ranks import share_documents
from marlinq.operations.quantize.tuning import TuningSettings, draw_calibration, hold_out
from marlinq.operations.quantize.unfinished_output import Output


@dataclass(frozen=True)
class RunText:
    """The text of a run.

    Attributes:
        calibration: documents that modules are calibrated on; empty where no stage reads text.
        learning: documents that tuning learns from; on the first rank only.
        held_out: documents that neither calibration nor tuning sees, to measure whether tuning helped; on the
            first rank only.
        tuning: settings of tuning, which depend on the text; None without tuning.
    """

    calibration: tuple[Document, ...] = ()
    learning: tuple[Document, ...] = ()
    held_out: tuple[Document, ...] = ()
    tuning: TuningSettings | None = None


def gather_text(prepared: PreparedRun, output: Output, *, progress: ReportProgress) -> RunText:
    """Gathers all text of the run and notes its identity in the folder.

    Args:
        prepared: decisions of the first stage.
        output: output folder, with text that the model wrote in an interrupted run.
        progress: called with (activity, steps done, steps in all) while the model writes.

    Raises:
        EnvironmentProblem: the model has no room to write the text that an interrupted run lacks.
        OutputError: the interrupted run had other text.
        UsageError: the run tunes, and every document holds images.
    """
    decisions, writer, ranks = prepared.decisions, output.writer, prepared.ranks
    if not decisions.calibrated or not (output.unsolved or output.untuned):
        return RunText()
    learning: list[Document] = []
    held_out: list[Document] = []
    text = prepared.gatherer.gather(writer) if ranks.first else None
    recipe, tuning = decisions.recipe, decisions.tuning
    if text is not None and tuning is not None and text.own_left_out:
        recipe = recipe.replace(tune_own_text=False)
        other = TuningSettings.of(recipe, decisions.work, decisions.device, own_text=False)
        # Where the device has no room to tune codes, these settings don't tune them either.
        tuning = other if tuning.code_rate else replace(other, code_rate=0.0)
    if text is not None and tuning is not None:
        # Tuning cuts rows anew out of the text, which rows with images don't allow.
        words = [each for each in (*text.documents, *text.tuned) if each.beside is None]
        if not words:
            raise UsageError(
                "tuning: needs calibration text without images, found none; add some with --calibration, or "
                "pass --tune-steps 0"
            )
        learning, held_out = hold_out(words)
        drawing = partial(
            draw_calibration,
            prepared.instance,
            learning,
            tuning,
            max_length=prepared.max_length,
            folder=writer.partial,
            progress=progress,
        )
        add_drawn_anew(writer, text, recipe, drawing, partial(prepared.gatherer.keep_sources, writer))
    documents = share_documents(None if text is None else text.documents, ranks)
    if text is not None:
        note_text(writer, decisions.recipe, text)
    # Held-out documents are left out of the calibration too: codes fit the text they were calibrated on
    # better than any other, so that tuning would hardly show a gain on it.
    unseen = set(held_out)
    calibration = tuple(each for each in documents if each not in unseen)
    return RunText(calibration, tuple(learning), tuple(held_out), tuning)
