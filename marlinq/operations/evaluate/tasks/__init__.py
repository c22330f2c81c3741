"""Scores on tasks of lm-evaluation-harness, and their recovery: the score in per cent of the original's."""

from __future__ import annotations

from marlinq.operations.evaluate.tasks.scores import Ratio, TaskScore, mean_recovery
from marlinq.operations.evaluate.tasks.task_run import TaskOptions, check_tasks, run_tasks

__all__ = ["Ratio", "TaskOptions", "TaskScore", "check_tasks", "mean_recovery", "run_tasks"]
