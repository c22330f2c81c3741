"""The operation behind ``marlinq report``: figures of a quantised checkpoint as HTML, CSV and JSON; and its
model card."""

from __future__ import annotations

from marlinq.operations.report.card import CARD, hub_id, model_card
from marlinq.operations.report.evaluation import check_keepable, keep_evaluation
from marlinq.operations.report.figures import TimeFigures
from marlinq.operations.report.written_report import WrittenReport, report, write_report

__all__ = [
    "CARD",
    "TimeFigures",
    "WrittenReport",
    "check_keepable",
    "hub_id",
    "keep_evaluation",
    "model_card",
    "report",
    "write_report",
]
