"""Scores on tasks of lm-evaluation-harness, and their recovery: the score in per cent of the original's."""

from __future__ import annotations

from marlinq.operations.evaluate.tasks.run import TaskOptions, check_tasks, run_tasks
from marlinq.operations.evaluate.tasks.scores import Ratio, TaskScore, mean_recovery

__all__ = ["Ratio", "TaskOptions", "TaskScore", "check_tasks", "mean_recovery", "run_tasks"]
