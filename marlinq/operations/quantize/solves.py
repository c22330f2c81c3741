"""Runs the solves of a decoder block in one process, or shares them among ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Protocol, TypeVar

import torch

from marlinq.core.errors import UnsupportedError
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import ModuleSpec
from marlinq.methods import SolveReport, Statistics
from marlinq.operations.quantize.batches_of_modules import joined
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.quantize_report import ModuleReport, module_report
from marlinq.operations.quantize.ranks import Ranks, RankShare, share_out

KeyT = TypeVar("KeyT", bound=Hashable)

_TRIED_CHANNELS = 64
"""least K and N of the layer that warms up the solver"""


@dataclass(frozen=True)
class Solve:
    """Modules that share an input and settings, and are solved together.

    Attributes:
        members: the modules.
        statistics: key of their input's statistics.
    """

    members: tuple[PlannedModule, ...]
    statistics: str

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K): output channels of all members together, and their input channels."""
        rows = sum(planned.projection.out_features for planned in self.members)
        return rows, self.members[0].projection.in_features


SolveRows = Callable[
    [Sequence[PlannedModule], Statistics | None, Sequence[slice]],
    list[tuple[QuantizedWeight, SolveReport]],
]
"""Function that solves a slice of output channels of each of several modules with common statistics."""


def shared_solves(
    solves: Sequence[Solve],
    statistics: dict[str, Statistics],
    solve: SolveRows,
    ranks: Ranks,
    *,
    cut: bool = True,
) -> Iterator[tuple[PlannedModule, QuantizedWeight, ModuleReport]]:
    """Solves all modules of a block; every rank gets all results.

    Args:
        solves: the solves, in the order of the results and alike on every rank.
        statistics: key -> statistics of this rank's batches; empty for a method without calibration. Entries
            are removed as they are used.
        solve: function that solves slices of modules.
        ranks: processes that share the work.
        cut: whether output channels of a module may be solved by different ranks.

    Yields:
        each module with its quantised weight, on the device, and its report.

    Raises:
        NumericsError: ``solve`` raised it.
        UnsupportedError: the method's statistics can't be shared by several ranks.
        EnvironmentProblem: another rank does not answer.
    """
    if ranks.size == 1:
        yield from _solved_here(solves, statistics, solve)
        return
    cut = cut and all(each.spec.scheme.per_output for job in solves for each in job.members)
    shares = share_out([job.shape for job in solves], ranks.size, cut=cut)
    owners: dict[str, tuple[int, ...]] = {}
    for job, share in zip(solves, shares, strict=True):
        owners[job.statistics] = tuple(sorted({*owners.get(job.statistics, ()), *share.owners}))
    add_up({name: statistics[name] for name in owners if name in statistics}, owners, ranks)
    mine = _solved_by(ranks.rank, solves, shares, statistics, solve)
    reports = [
        ranks.share_json({name: asdict(report) for name, (_, report) in mine.items()}, source)
        for source in range(ranks.size)
    ]
    for job, share in zip(solves, shares, strict=True):
        gathered = statistics.get(job.statistics)
        for planned in job.members:
            name = planned.projection.name
            own = mine[name][0] if name in mine else None
            parts = [
                ranks.share_weight(
                    own if owner == ranks.rank else None, _slice_of(planned, share, owner), owner
                )
                for owner in share.owners
            ]
            report = SolveReport.of_slices([SolveReport(**reports[owner][name]) for owner in share.owners])
            yield planned, joined(parts), module_report(planned, gathered, report)
            mine.pop(name, None)
    statistics.clear()


def try_solver(plan: OutputPlan, device: torch.device) -> None:
    """Solves a small layer of ones, to load kernels and libraries. The first solve of a process spends half a
    second on that, which can pass in a thread before the first block."""
    planned = next((each for each in plan.modules.values() if each.method is plan.method), None)
    if planned is None:
        return
    scheme, options = planned.spec.scheme, planned.options
    k = max(scheme.granularity.channels, _TRIED_CHANNELS)
    # A new thread's current device is the first GPU.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        statistics = None
        if plan.method.calibrated:
            statistics = plan.method.statistics(k, options, device=device, name="ones")
            statistics.add(torch.eye(k, device=device))
        plan.method.solve([torch.ones(k, k, device=device)], statistics, scheme, options, names=["ones"])


class Group(Protocol):
    """Modules that are solved together, and the statistics of their input."""

    @property
    def members(self) -> tuple[PlannedModule, ...]: ...

    @property
    def statistics(self) -> Statistics | None: ...


GroupT = TypeVar("GroupT", bound=Group)


def solves_in_turn(
    turns: Iterable[Sequence[GroupT]],
    solve: Callable[[Sequence[GroupT]], list[list[tuple[QuantizedWeight, SolveReport]]]],
    ranks: Ranks,
) -> Iterator[tuple[GroupT, PlannedModule, QuantizedWeight, SolveReport]]:
    """Solves groups whose statistics are on every rank, each group on one rank.

    Args:
        turns: lists of groups, alike on every rank. The next list is asked for after all results of the last
            one were taken.
        solve: function that solves groups; for each group it returns (weight, report) of every module.
        ranks: processes that share the work.

    Yields:
        the group, and each of its modules with weight and report.
    """
    size = ranks.size
    for turn in turns:
        own = turn[ranks.rank :: size]
        mine = solve(own) if own else []
        told = [[asdict(report) for _, report in solved] for solved in mine]
        reports = [ranks.share_json(told, owner) for owner in range(min(size, len(turn)))]
        for place, group in enumerate(turn):
            owner, at = place % size, place // size
            for number, planned in enumerate(group.members):
                given = mine[at][number][0] if owner == ranks.rank else None
                weight = ranks.share_weight(given, planned.spec, owner)
                yield group, planned, weight, SolveReport(**reports[owner][at][number])
        # Frees the statistics of these groups before those of the next are gathered.
        del own, mine


def add_up(
    statistics: Mapping[KeyT, Statistics], owners: Mapping[KeyT, tuple[int, ...]], ranks: Ranks
) -> None:
    """Sums the statistics of every rank's batches, in place.

    Args:
        statistics: statistics by key, with the same keys in the same order on every rank. On ranks that don't
            own them they become undefined, except their number of tokens.
        owners: ranks that need the sum, by key.
        ranks: processes that share the work.

    Raises:
        UnsupportedError: this kind of statistics can't be summed.
    """
    if ranks.size == 1 or not statistics:
        return
    names = list(statistics)
    seen = torch.tensor([statistics[name].tokens for name in names], device=ranks.device)
    ranks.sum(seen, range(ranks.size))
    for name, tokens in zip(names, seen.tolist(), strict=True):
        as_share = getattr(statistics[name], "as_share", None)
        if as_share is None:
            raise UnsupportedError(
                f"{name}: {type(statistics[name]).__name__} can't be added up over {ranks.size} ranks; run "
                "the method in one process"
            )
        for tensor in as_share(tokens):
            ranks.sum(tensor, owners[name])


def _solved_here(
    solves: Sequence[Solve], statistics: dict[str, Statistics], solve: SolveRows
) -> Iterator[tuple[PlannedModule, QuantizedWeight, ModuleReport]]:
    for number, job in enumerate(solves):
        gathered = statistics.get(job.statistics)
        whole = [slice(None) for _ in job.members]
        for planned, (weight, report) in zip(job.members, solve(job.members, gathered, whole), strict=True):
            yield planned, weight, module_report(planned, gathered, report)
        if all(later.statistics != job.statistics for later in solves[number + 1 :]):
            statistics.pop(job.statistics, None)


def _solved_by(
    rank: int,
    solves: Sequence[Solve],
    shares: Sequence[RankShare],
    statistics: Mapping[str, Statistics],
    solve: SolveRows,
) -> dict[str, tuple[QuantizedWeight, SolveReport]]:
    """Solves the share of ``rank``: name of a module -> its slice and report."""
    mine: dict[str, tuple[QuantizedWeight, SolveReport]] = {}
    for job, share in zip(solves, shares, strict=True):
        if rank not in share.owners:
            continue
        rows = [share.rows(planned.projection.out_features, rank) for planned in job.members]
        results = solve(job.members, statistics.get(job.statistics), rows)
        mine |= {
            planned.projection.name: result for planned, result in zip(job.members, results, strict=True)
        }
    return mine


def _slice_of(planned: PlannedModule, share: RankShare, owner: int) -> ModuleSpec:
    """Shape and scheme of the slice of a module that ``owner`` solves."""
    rows = share.rows(planned.projection.out_features, owner)
    return replace(planned.spec, out_features=rows.stop - rows.start)
