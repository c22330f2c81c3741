"""Quantises the output head, which is larger than any linear of a block, in slices of output channels."""

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
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.ranks import Ranks
from marlinq.operations.quantize.solves import add_up

SLICE_ROWS = 1 << 15
"""Output channels solved at a time: about as many as the widest linears of a block have, so that the head
needs no more device memory than they do."""


def solve_head(
    planned: PlannedModule,
    weight: Tensor,
    statistics: Statistics | None,
    *,
    device: torch.device,
    rows: int = SLICE_ROWS,
) -> tuple[QuantizedWeight, SolveReport]:
    """Quantises the output head.

    Output channels are independent of each other where each has scales of its own, and are then solved in
    slices. The result equals that of one solve up to the rounding of matrix products.

    Args:
        planned: the head.
        weight: float [N, K], on the CPU in its stored dtype.
        statistics: statistics of the head's input; None for a method without calibration.
        device: device that slices are solved on.
        rows: output channels per slice.

    Returns:
        The quantised weight, on the CPU, and the report of its solve.
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
    """Statistics of the head's input (the final norm's output) over the batches of all ranks.

    Args:
        gathering: model and replay.
        head: the output head.
        batches: calibration text of this rank.
        states: outputs of the last block.
        ranks: processes that share the work.
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
