"""The operation behind ``marlinq eval``: perplexity, and the distance to the unquantised original."""

from __future__ import annotations

from marlinq.operations.evaluate.measure import DEFAULT_SEED, Evaluation, divergence, evaluate
from marlinq.operations.evaluate.tasks import TaskOptions
from marlinq.operations.evaluate.windows import EvaluationText, write_windows

__all__ = [
    "DEFAULT_SEED",
    "Evaluation",
    "EvaluationText",
    "TaskOptions",
    "divergence",
    "evaluate",
    "write_windows",
]
