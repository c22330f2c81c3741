"""The output head: larger than any linear of a block, so it is solved in slices of its output channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from marlinq.calibration import Batch, HiddenStates
from marlinq.core.weight import QuantizedWeight
from marlinq.methods import SolveReport, Statistics
from marlinq.models import ModelInstance
from marlinq.operations.quantize.batches_of_modules import joined
from marlinq.operations.quantize.gathering import Gathering
from marlinq.operations.quantize.planning import PlannedModule
from marlinq.operations.quantize.ranks import Ranks
from marlinq.operations.quantize.solves import add_up

SLICE_ROWS = 1 << 15
"""Output channels solved at a time: about as many as the widest linears of a block have, so that the head
needs no more memory on the device than they do."""


def solve_head(
    planned: PlannedModule,
    weight: Tensor,
    statistics: Statistics | None,
    *,
    device: torch.device,
    rows: int = SLICE_ROWS,
) -> tuple[QuantizedWeight, SolveReport]:
    """Quantises the output head.

    Output channels that share nothing are solved in slices; the result is that of one solve, up to the
    rounding of the matrix products.

    Args:
        planned: the head.
        weight: float [N, K], on the CPU in its stored dtype.
        statistics: statistics of the head's input; None for a method that is not calibrated.
        device: where slices are solved.
        rows: output channels of a slice.

    Returns:
        The quantised weight, on the CPU, and the report.
    """
    parts: list[QuantizedWeight] = []
    reports: list[SolveReport] = []
    if not planned.spec.scheme.per_output:
        rows = len(weight)
    for part in torch.split(weight, rows):
        ((quantized, report),) = planned.method.solve(
            [part.to(device, torch.float32)],
            statistics,
            planned.spec.scheme,
            planned.options,
            names=[planned.projection.name],
        )
        parts.append(quantized.to(torch.device("cpu")))
        reports.append(report)
    return joined(parts), SolveReport.of_slices(reports)


def head_statistics(
    gathering: Gathering, head: PlannedModule, batches: Sequence[Batch], states: HiddenStates, ranks: Ranks
) -> Statistics:
    """Statistics of the head's input, the final norm's output, over the batches of all ranks.

    Args:
        gathering: runs the model.
        head: the output head.
        batches: calibration text of this rank.
        states: hidden states that leave the last block.
        ranks: this process and the others.
    """
    statistics = gathering.empty(head)
    masks = iter(gathering.masks)
    gathering.replay.after_blocks(
        ((batch.ids, states.load(number)) for number, batch in enumerate(batches)),
        head.projection,
        lambda name, x: statistics.add(x, next(masks)),
    )
    name = head.projection.name
    add_up({name: statistics}, {name: (0,)}, ranks)
    return statistics


def quantize_head(
    instance: ModelInstance, head: PlannedModule, statistics: Statistics | None
) -> tuple[QuantizedWeight, SolveReport]:
    """Reads the stored head and solves it as :func:`solve_head` does."""
    projection = head.projection
    shape = (projection.out_features, projection.in_features)
    stored = instance.read(projection.parameter, shape[::-1] if projection.transposed else shape)
    return solve_head(head, projection.view(stored), statistics, device=instance.device)
