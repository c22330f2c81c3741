"""Kernels of quantisation methods: the panels of GPTQ."""

from marlinq.kernels.solve.many import prepare_panels, round_panels
from marlinq.kernels.solve.panel import (
    PANEL_ROWS,
    PanelTensors,
    check_panels,
    prepare_panel,
    round_panel,
)

__all__ = [
    "PANEL_ROWS",
    "PanelTensors",
    "check_panels",
    "prepare_panel",
    "prepare_panels",
    "round_panel",
    "round_panels",
]
