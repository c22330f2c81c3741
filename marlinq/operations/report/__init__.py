"""What a quantised checkpoint looks like inside, as a page, a table and JSON; and its model card."""

from __future__ import annotations

from marlinq.operations.report.card import CARD, hub_id, model_card
from marlinq.operations.report.evaluation import keep_evaluation
from marlinq.operations.report.figures import CheckpointFigures, ModuleFigures, ScaleFigures, TimeFigures
from marlinq.operations.report.operation import WrittenReport, report, write_report

__all__ = [
    "CARD",
    "CheckpointFigures",
    "ModuleFigures",
    "ScaleFigures",
    "TimeFigures",
    "WrittenReport",
    "hub_id",
    "keep_evaluation",
    "model_card",
    "report",
    "write_report",
]
