"""End-to-end tuning of a quantised model towards the original's predictions.

Tuning changes values of stored tensors, never a shape, a dtype or a name.

    text_rows     text to learn from, in rows of one length
    teacher       runs the original once and keeps its last hidden states
    student       the quantised model with trainable codes, scales and vectors, one dense block at a time
    cuda_graphs   the student's passes as CUDA graphs
    loop          the optimiser, and the checks on held-out text
    saved_files   state and result in the unfinished folder
    run           puts the parts together
"""

from __future__ import annotations

from marlinq.operations.quantize.tuning.loop import TuningReport, TuningSettings
from marlinq.operations.quantize.tuning.text_rows import hold_out
from marlinq.operations.quantize.tuning.tuning_run import (
    NOTE,
    TuningRun,
    check_head,
    draw_calibration,
    forget_tuning,
    settings_that_fit,
    tune,
    tuning_bytes,
)

__all__ = [
    "NOTE",
    "TuningReport",
    "TuningRun",
    "TuningSettings",
    "check_head",
    "draw_calibration",
    "forget_tuning",
    "hold_out",
    "settings_that_fit",
    "tune",
    "tuning_bytes",
]
