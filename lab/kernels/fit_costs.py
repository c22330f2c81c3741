"""Fits the cost models' constants to measured sweeps, and reports the cost of the models' choices.

    python lab/kernels/kernel_sweep.py --model llama-3-8b --sample 12 --json sweep.json
    python lab/kernels/fit_costs.py sweep.json ...

Reads any number of sweeps and needs no GPU. For every kernel the constants of its ``Costs`` are fitted to the
logarithms of the times; the fastest candidates count most. Then the models, with the fitted constants or with
``--as-is`` those of the package, choose among the measured candidates of every cell: the table gives the time
of the best and of the chosen one. ``--choose`` then looks for constants that choose better, at random
(:class:`Search`). ``--validate`` fits again without each layer and lets the models choose for the one left
out. The constants are printed ready to be pasted.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from marlinq.core.granularity import Granularity
from marlinq.kernels import Problem
from marlinq.kernels.choose.decision import considered
from marlinq.kernels.contract.configuration import VARIANTS, Configuration
from marlinq.kernels.contract.demands import Demands
from marlinq.kernels.contract.device import H200
from marlinq.kernels.contract.weight_formats import INT4, WEIGHT_FORMATS
from marlinq.kernels.variants import bulk, stream, warpgroup, warpgroup_config, warpgroup_costs

KERNELS: dict[str, tuple[type[Any], Callable[..., tuple[float, str]], Any, Any]] = {
    "stream": (stream.StreamConfig, stream.estimate, stream.COSTS, stream.candidates),
    "bulk": (bulk.BulkConfig, bulk.estimate, bulk.COSTS, bulk.candidates),
    "warpgroup": (
        warpgroup_config.WarpgroupConfig,
        warpgroup_costs.estimate,
        warpgroup_costs.COSTS,
        warpgroup.candidates,
    ),
}
_DECAY, _LEAST = 0.25, 0.06
"""a candidate at x times the best time has weight exp(-ln(x) / _DECAY), but at least _LEAST"""
_ROBUST = 0.1
"""error of a logarithm above which errors count linearly, so that outliers don't distort the fit"""
_REACH, _PRIOR_ERROR = 1.0, 0.15
"""a constant that moves by _REACH from its start, as a logarithm, costs as much as an error of
_PRIOR_ERROR"""
_STEP, _FARTHEST = 0.1, 0.7
"""move of a constant in a step of the search, and largest total move, as logarithms"""
_UNDECIDED, _ERROR_COUNTS, _HEAT = 0.006, 0.05, 1.5e-3
"""difference below which two estimates count as equal; weight of the estimates' errors in the search;
increase of the loss that its first steps accept"""


@dataclass(frozen=True)
class Measured:
    """One candidate's time.

    Attributes:
        cell: layer, batch and sweep; times of different sweeps can't be compared.
        layer: name of the layer.
        problem: the multiplication.
        kernel: name of the kernel.
        config: compile-time parameters of the kernel.
        seconds: median seconds of a launch.
        live: whether decisions still consider this candidate; others are left out of fits and choices.
    """

    cell: tuple[str, int, int]
    layer: str
    problem: Problem
    kernel: str
    config: Configuration
    seconds: float
    live: bool


@cache
def _considered(kernel: str, problem: Problem) -> frozenset[Configuration]:
    names = [variant.name for variant in considered(problem, H200, Demands(), tuple(VARIANTS.values()))]
    return frozenset(KERNELS[kernel][3](problem, H200) if kernel in names else ())


def read(paths: Iterable[Path]) -> tuple[list[Measured], int]:
    """(measured candidates, number of those left out because their parameters no longer exist)."""
    found: list[Measured] = []
    skipped = 0
    for sweep, path in enumerate(paths):
        for row in json.loads(path.read_text())["rows"]:
            group, zeros = row.get("group_size", 128), row.get("asymmetric", False)
            stored = WEIGHT_FORMATS[row.get("format", INT4.name)]
            problem = Problem(
                row["m"], row["n"], row["k"], Granularity.from_group_size(group), zeros, False, stored
            )
            cell = row["layer"], row["m"], sweep
            for candidate in row["candidates"]:
                kernel = candidate["kernel"]
                names = {field.name for field in fields(KERNELS[kernel][0])}
                if set(candidate["config"]) != names:
                    skipped += 1
                    continue
                config = KERNELS[kernel][0](**candidate["config"])
                live = config in _considered(kernel, problem)
                found.append(
                    Measured(cell, row["layer"], problem, kernel, config, candidate["seconds"], live)
                )
    return found, skipped


def _cells(measured: Iterable[Measured]) -> dict[tuple[str, int, int], list[Measured]]:
    cells = defaultdict(list)
    for one in measured:
        cells[one.cell].append(one)
    return cells


def expected(measured: Iterable[Measured], costs: Mapping[str, Any]) -> list[float]:
    """The models' expected seconds of each candidate."""
    return [KERNELS[one.kernel][1](one.problem, H200, one.config, costs[one.kernel])[0] for one in measured]


class Fit:
    """Least squares of the logarithms of one kernel's times, by Gauss and Newton with damping."""

    def __init__(self, kernel: str, measured: list[Measured], start: Any) -> None:
        self.kernel, self.start = kernel, start
        self.measured = [one for one in measured if one.kernel == kernel and one.live]
        self.names = [field.name for field in fields(start)]
        best = {cell: min(one.seconds for one in listed) for cell, listed in _cells(self.measured).items()}
        self.truth = np.log([one.seconds for one in self.measured])
        slower = self.truth - np.log([best[one.cell] for one in self.measured])
        self.weights = np.maximum(np.exp(-slower / _DECAY), _LEAST)

    def costs(self, point: np.ndarray) -> Any:
        """The constants at ``point``, the logarithms of factors on the start's constants."""
        factors = zip(self.names, point, strict=True)
        return replace(self.start, **{name: getattr(self.start, name) * math.exp(x) for name, x in factors})

    def errors(self, point: np.ndarray) -> np.ndarray:
        """Errors of the logarithms."""
        costs = {self.kernel: self.costs(point)}
        return np.log(expected(self.measured, costs)) - self.truth

    def loss(self, errors: np.ndarray, point: np.ndarray) -> float:
        size = np.abs(errors)
        huber = np.where(size < _ROBUST, size**2, _ROBUST * (2 * size - _ROBUST))
        return float((self.weights * huber).sum() + ((point / _REACH * _PRIOR_ERROR) ** 2).sum())

    def run(self, rounds: int) -> Any:
        """The fitted constants."""
        point = np.zeros(len(self.names))
        errors = self.errors(point)
        loss, damping = self.loss(errors, point), 1e-2
        prior = np.eye(len(point)) * (_PRIOR_ERROR / _REACH)
        for _ in range(rounds):
            slopes = np.empty((len(errors), len(point)))
            for place in range(len(point)):
                moved = point.copy()
                moved[place] += 0.02
                slopes[:, place] = (self.errors(moved) - errors) / 0.02
            robust = np.sqrt(self.weights * np.minimum(1, _ROBUST / np.maximum(np.abs(errors), 1e-9)))
            system = np.concatenate([slopes * robust[:, None], prior])
            right = -np.concatenate([errors * robust, prior @ point])
            gained = 0.0
            while damping < 1e6:
                normal = system.T @ system
                step = np.linalg.solve(normal + damping * np.diag(normal.diagonal()), system.T @ right)
                trial = point + np.clip(step, -1, 1)
                found = self.errors(trial)
                if (new := self.loss(found, trial)) < loss:
                    gained = loss - new
                    point, errors, loss, damping = trial, found, new, max(damping / 4, 1e-6)
                    break
                damping *= 4
            if gained < 1e-4 * loss:
                break
        return self.costs(point)


def fit(measured: list[Measured], costs: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Fitted constants of every kernel that was measured; those of ``costs`` for the others."""
    found = dict(costs)
    for kernel in {one.kernel for one in measured}:
        found[kernel] = Fit(kernel, measured, costs[kernel]).run(rounds)
    return found


@dataclass(frozen=True)
class Choice:
    """The models' choice in a cell.

    Attributes:
        cell: layer, batch and sweep.
        best: fastest measured candidate.
        chosen: measured candidate that the models expect to be fastest.
        expected: expected seconds of ``chosen``.
        open: ratio of the expected time of ``favourite`` to ``expected``.
        favourite: candidate that the models expect to be fastest, measured or not.
    """

    cell: tuple[str, int, int]
    best: Measured
    chosen: Measured
    expected: float
    open: float
    favourite: Configuration

    @property
    def loss(self) -> float:
        """Ratio of the chosen candidate's time to the best one's."""
        return self.chosen.seconds / self.best.seconds


def choices(measured: list[Measured], costs: Mapping[str, Any]) -> list[Choice]:
    """The models' choice in every cell."""
    found = []
    for cell, listed in _cells(measured).items():
        live = [one for one in listed if one.live]
        if not live:
            continue
        times = expected(live, costs)
        place = min(range(len(live)), key=lambda place: times[place])
        best = min(listed, key=lambda one: one.seconds)
        problem = best.problem
        every = (
            (KERNELS[kernel][1](problem, H200, config, costs[kernel])[0], config)
            for kernel in {one.kernel for one in live}
            for config in _considered(kernel, problem)
        )
        seconds, favourite = min(every, key=itemgetter(0))
        found.append(Choice(cell, best, live[place], times[place], seconds / times[place], favourite))
    return found


def _mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


class Search:
    """Searches for constants that choose better candidates, by simulated annealing.

    The loss is the mean logarithm of the chosen candidates' times over the best ones', where candidates
    within about ``_UNDECIDED`` of the models' favourite count as chosen too, plus a small share of the
    estimates' errors.

    Args:
        measured: candidates of all kernels.
        kernels: kernels whose constants may change.
    """

    def __init__(self, measured: list[Measured], kernels: Iterable[str]) -> None:
        self.measured = [one for one in measured if one.live]
        self.seconds = np.array([one.seconds for one in self.measured])
        places = defaultdict(list)
        for place, one in enumerate(self.measured):
            places[one.cell].append(place)
        self.cells = [np.array(listed) for listed in places.values()]
        self.best = np.empty(len(self.measured))
        for cell in self.cells:
            self.best[cell] = self.seconds[cell].min()
        self.weights = (self.best / self.seconds) ** (1 / _DECAY)
        self.places = {
            kernel: np.array([place for place, one in enumerate(self.measured) if one.kernel == kernel])
            for kernel in {one.kernel for one in self.measured}.intersection(kernels)
        }

    def loss(self, times: np.ndarray) -> float:
        """Loss of choices by the models' ``times``: time lost in the cells, and the times' errors."""
        slower = np.log(self.seconds / self.best)
        lost = 0.0
        for cell in self.cells:
            chosen = np.exp(-(times[cell] / times[cell].min() - 1) / _UNDECIDED)
            lost += float((chosen * slower[cell]).sum() / chosen.sum())
        errors = np.minimum(np.abs(np.log(times / self.seconds)), 3 * _ROBUST)
        return lost / len(self.cells) + _ERROR_COUNTS * float(
            (self.weights * errors).sum() / self.weights.sum()
        )

    def run(self, costs: Mapping[str, Any], steps: int, seed: int) -> dict[str, Any]:
        """The best after ``steps`` random changes of one to three constants, none far from its start."""
        chance = random.Random(seed)
        now = dict(costs)
        times = np.array(expected(self.measured, now))
        loss = least = self.loss(times)
        found = dict(now)
        for step in range(steps):
            kernel = chance.choice(sorted(self.places))
            names = [field.name for field in fields(now[kernel])]
            changed = {}
            for name in chance.sample(names, chance.choice((1, 1, 2, 3))):
                value = getattr(now[kernel], name) * math.exp(chance.gauss(0, _STEP))
                if abs(math.log(value / getattr(costs[kernel], name))) < _FARTHEST:
                    changed[name] = value
            trial = {**now, kernel: replace(now[kernel], **changed)}
            new_times = times.copy()
            of_kernel = self.places[kernel]
            new_times[of_kernel] = expected((self.measured[place] for place in of_kernel), trial)
            new = self.loss(new_times)
            heat = _HEAT * (1 - step / steps)
            if new < loss or chance.random() < math.exp((loss - new) / heat):
                now, times, loss = trial, new_times, new
                if loss < least:
                    least, found = loss, dict(now)
        return found


def _brief(config: Configuration) -> str:
    kernel = next(name for name, entry in KERNELS.items() if isinstance(config, entry[0]))
    return f"{kernel} {' '.join(str(int(value)) for value in asdict(config).values())}"


def show(found: list[Choice], every: bool) -> None:
    """The cells, worst first, and the geometric means of every batch."""
    for choice in sorted(found, key=lambda choice: -choice.loss)[: len(found) if every else 12]:
        print(
            f"  {choice.cell[0]:20} M={choice.cell[1]:<5} best {choice.best.seconds * 1e6:8.2f} us "
            f"{_brief(choice.best.config):34} chosen {choice.chosen.seconds * 1e6:8.2f} "
            f"(expected {choice.expected * 1e6:8.2f}) {_brief(choice.chosen.config):34} {choice.loss:.3f}"
        )
    print("  favourites nobody has measured, and what they are expected to take of the chosen one's time:")
    for choice in sorted(found, key=lambda choice: choice.open)[: len(found) if every else 12]:
        print(f"  {choice.cell[0]:20} M={choice.cell[1]:<5} {_brief(choice.favourite):34} {choice.open:.3f}")
    for m in sorted({choice.cell[1] for choice in found}):
        losses = [choice.loss for choice in found if choice.cell[1] == m]
        print(f"  M={m:<5} {len(losses):2} cells: chosen / best {_mean(losses):.3f}, worst {max(losses):.3f}")


def _accuracy(measured: list[Measured], costs: Mapping[str, Any]) -> None:
    times = expected(measured, costs)
    best = {cell: min(one.seconds for one in listed) for cell, listed in _cells(measured).items()}
    for kernel in KERNELS:
        errors = [
            (math.log(time / one.seconds), one.seconds / best[one.cell])
            for time, one in zip(times, measured, strict=True)
            if one.kernel == kernel and one.live
        ]
        if errors:
            near = [abs(error) for error, slower in errors if slower < 1.3]
            print(
                f"  {kernel}: {len(errors)} candidates, median error {np.median(np.abs(errors), 0)[0]:.3f}; "
                f"of the {len(near)} within 1.3 of the best {np.median(near):.3f}, "
                f"nine in ten {np.quantile(near, 0.9):.3f}"
            )


def _moved(costs: Any, chance: random.Random) -> Any:
    """Every constant times a random factor of up to two."""
    return replace(
        costs, **{name: value * 2 ** chance.uniform(-1, 1) for name, value in asdict(costs).items()}
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", nargs="+", type=Path, help="JSON files of kernel_sweep.py")
    parser.add_argument("--as-is", action="store_true", help="judge the package's constants, fit nothing")
    parser.add_argument("--validate", action="store_true", help="fit without each layer in turn, too")
    parser.add_argument("--rounds", type=int, default=25, help="steps of a fit")
    parser.add_argument("--choose", type=int, default=0, help="steps towards better choices, behind the fit")
    parser.add_argument("--seed", type=int, default=0, help="of those steps")
    parser.add_argument(
        "--kernel", action="append", choices=KERNELS, help="whose constants they change; default: all"
    )
    parser.add_argument("--all", action="store_true", help="show every cell, not only the worst")
    options = parser.parse_args()
    measured, skipped = read(options.sweeps)
    live = sum(one.live for one in measured)
    print(
        f"{len(measured)} candidates of {len(_cells(measured))} cells, {live} of which are still considered; "
        f"{skipped} have other parameters"
    )
    start = {kernel: entry[2] for kernel, entry in KERNELS.items()}
    costs = start if options.as_is else fit(measured, start, options.rounds)
    if options.choose:
        costs = Search(measured, options.kernel or KERNELS).run(costs, options.choose, options.seed)
    if options.choose or not options.as_is:
        for kernel, one in costs.items():
            print(f"{kernel}:")
            for name, value in asdict(one).items():
                print(f"    {name}: float = {value:.3g}".replace("e+", "e"))
    _accuracy(measured, costs)
    show(choices(measured, costs), options.all)
    if options.validate:
        # Neutral ones: the package's own have seen every layer.
        chance = random.Random(0)
        neutral = {kernel: _moved(one, chance) for kernel, one in start.items()}
        left_out = []
        for layer in sorted({one.layer for one in measured}):
            rest = [one for one in measured if one.layer != layer]
            own = [one for one in measured if one.layer == layer]
            left_out += choices(own, fit(rest, neutral, options.rounds))
        print("every layer by a fit without it:")
        show(left_out, options.all)
    return 0


if __name__ == "__main__":
    sys.exit(main())
