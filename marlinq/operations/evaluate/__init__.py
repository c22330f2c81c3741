"""The operation behind ``marlinq eval``: perplexity, and the distance to an original."""

from __future__ import annotations

from marlinq.operations.evaluate.measure import Evaluation, evaluate
from marlinq.operations.evaluate.tasks import TaskOptions
from marlinq.operations.evaluate.text import EvaluationText

__all__ = ["Evaluation", "EvaluationText", "TaskOptions", "evaluate"]
