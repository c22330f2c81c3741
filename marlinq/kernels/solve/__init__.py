"""Kernels of quantisation methods: GPTQ's inner step, and weights with trained codes and scales."""

from marlinq.kernels.solve.batched_solve import prepare_panels, round_panels
from marlinq.kernels.solve.panel import (
    PANEL_ROWS,
    PanelTensors,
    check_panels,
    launch,
    prepare_panel,
    round_panel,
)
from marlinq.kernels.solve.trained_weight import TunedTensors, prepare_gradients, prepare_weight

__all__ = [
    "PANEL_ROWS",
    "PanelTensors",
    "TunedTensors",
    "check_panels",
    "launch",
    "prepare_gradients",
    "prepare_panel",
    "prepare_panels",
    "prepare_weight",
    "round_panel",
    "round_panels",
]
