"""Tuning a quantised model end to end, so that it predicts what the original predicts.

The plan of the quantise operation says what is stored; nothing here changes a shape, a dtype or a name. The
parts: :mod:`rows` is the text; :mod:`teacher` runs the original once and keeps its last hidden states;
:mod:`student` is the quantised model with weights that follow a gradient, a block at a time; :mod:`loop` is
the optimisation; :mod:`files` keeps state and result in the unfinished folder; :mod:`run` puts them together.
"""

from __future__ import annotations

from marlinq.operations.quantize.tuning.loop import TuningReport, TuningSettings
from marlinq.operations.quantize.tuning.rows import hold_out
from marlinq.operations.quantize.tuning.run import (
    NOTE,
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
    "TuningSettings",
    "check_head",
    "draw_calibration",
    "forget_tuning",
    "hold_out",
    "settings_that_fit",
    "tune",
    "tuning_bytes",
]
