"""Warnings about a plan whose output some servers would refuse or could not split over GPUs."""

from __future__ import annotations

import re

from marlinq.formats.dialects.name_patterns import FUSED
from marlinq.models import Blueprint
from marlinq.operations.quantize.planned_module import described_scheme
from marlinq.operations.quantize.planning import OutputPlan

_MOST_GPUS = 8
"""largest number of GPUs over which tensor parallelism splits layers"""


def split_notes(blueprint: Blueprint, plan: OutputPlan) -> list[str]:
    """Warnings about experts whose groups are too large to split them over 8 GPUs.

    Servers split an expert's intermediate channels, which are few, into shares of whole groups.
    """
    notes: dict[tuple[int, int], str] = {}
    for experts in (each for block in blueprint.blocks for each in block.experts):
        planned = plan.modules.get(experts.of(0)[1].name)
        size = 0 if planned is None else planned.granularity.channels
        k = experts.intermediate
        fitting = [small for small in (64, 32) if small < size and k % (_MOST_GPUS * small) == 0]
        if fitting and k % (_MOST_GPUS * size):
            most = max(gpus for gpus in range(1, _MOST_GPUS + 1) if k % (gpus * size) == 0)
            notes[k, size] = (
                f"experts of {k} channels in groups of {size} can be split over at most {most} GPUs; "
                f"--group-size {fitting[0]} can over {_MOST_GPUS}"
            )
    return list(notes.values())


def fused_notes(blueprint: Blueprint, plan: OutputPlan) -> list[str]:
    """Warnings about linears that servers fuse into one layer but that have different schemes."""
    notes: dict[str, str] = {}
    for block in blueprint.blocks:
        names = {projection.name for projection in block.projections}
        for _, parts in FUSED:
            for first in (name for name in names if name.rpartition(".")[2] == parts[0]):
                parent = first.rpartition(".")[0]
                members = [f"{parent}.{part}" for part in parts]
                ways = {name.rpartition(".")[2]: described_scheme(plan.modules.get(name)) for name in members}
                if not names.issuperset(members) or len(set(ways.values())) == 1:
                    continue
                inner = re.sub(r"^.*?\.\d+\.", "", parent)
                told = ", ".join(f"{part} {way}" for part, way in ways.items())
                notes.setdefault(
                    inner,
                    f"{parent}: {told}; vLLM and SGLang make one layer of them and load one scheme only; let "
                    f"the rule name all: --override '{re.escape(inner)}\\.({'|'.join(parts)})$=...'",
                )
    return list(notes.values())
