"""The output head: larger than any linear of a block, so it is solved in slices of its output channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight
from marlinq.methods import Method, SolveReport, Statistics
from marlinq.operations.quantize.planning import PlannedModule

SLICE_ROWS = 1 << 15
"""Output channels solved at a time: about as many as the widest linears of a block have, so that the head
needs no more memory on the device than they do."""


def solve_head(
    planned: PlannedModule,
    weight: Tensor,
    statistics: Statistics | None,
    method: Method[Any, Any],
    *,
    device: torch.device,
    rows: int = SLICE_ROWS,
) -> tuple[QuantizedWeight, SolveReport]:
    """Quantises the output head.

    Output channels don't influence each other, so the result is that of one solve, up to the rounding of the
    matrix products.

    Args:
        planned: the head.
        weight: float [N, K], on the CPU in its stored dtype.
        statistics: of the head's input; None for a method that is not calibrated.
        method: of the recipe.
        device: where slices are solved.
        rows: output channels of a slice.

    Returns:
        The quantised weight, on the CPU, and the report.
    """
    parts: list[QuantizedWeight] = []
    reports: list[SolveReport] = []
    for part in torch.split(weight, rows):
        ((quantized, report),) = method.solve(
            [part.to(device, torch.float32)],
            statistics,
            planned.spec.scheme,
            planned.options,
            names=[planned.projection.name],
        )
        parts.append(quantized.to(torch.device("cpu")))
        reports.append(report)
    return joined(parts), SolveReport.of_slices(reports)


def joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The weight whose output channels are those of ``parts``, one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    return QuantizedWeight.from_codes(
        first.scheme,
        torch.cat([part.codes for part in parts], dim=1),
        scales=torch.cat([part.scales for part in parts], dim=1),
        zeros=torch.cat([part.zeros for part in parts], dim=1),
        g_idx=first.g_idx,
    )
