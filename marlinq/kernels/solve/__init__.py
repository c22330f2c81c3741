"""Kernels of quantisation methods: the panels of GPTQ."""

from marlinq.kernels.solve.panel import PANEL_ROWS, PanelTensors, prepare_panel, round_panel

__all__ = ["PANEL_ROWS", "PanelTensors", "prepare_panel", "round_panel"]
