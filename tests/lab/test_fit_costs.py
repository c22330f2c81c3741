"""Fitting the cost models: constants that made up a sweep are found again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean, median

from lab.kernels import fit_costs
from marlinq.kernels.variants import stream
from tests.kernels.problems import int4_problem

TRUTH = replace(stream.COSTS, step=1.6 * stream.COSTS.step, codes=1.4 * stream.COSTS.codes)


def sweep(path: Path) -> list[Path]:
    """A sweep whose times are the model's with other constants; one candidate has a parameter of the past."""
    rows = []
    for name, n, k in (("small", 4096, 4096), ("tall", 4096, 14336), ("wide", 28672, 4096)):
        problem = int4_problem(2, n, k, 128, False, False)
        listed = [
            {
                "kernel": "stream",
                "config": asdict(config),
                "seconds": stream.estimate(problem, fit_costs.H200, config, TRUTH)[0],
            }
            for config in stream.candidates(problem, fit_costs.H200)
        ]
        rows.append({"layer": name, "n": n, "k": k, "m": 2, "candidates": listed})
    listed.append({**listed[0], "config": {**listed[0]["config"], "former": 1}})
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    return [path]


def test_constants_are_found_again(tmp_path: Path) -> None:
    measured, skipped = fit_costs.read(sweep(tmp_path / "sweep.json"))
    assert skipped == 1
    costs = {name: entry[2] for name, entry in fit_costs.KERNELS.items()}

    def error(constants: dict[str, object]) -> float:
        times = fit_costs.expected(measured, constants)
        return median(abs(time / one.seconds - 1) for time, one in zip(times, measured, strict=True))

    fitted = fit_costs.fit(measured, costs, 12)
    # A twentieth of what was off; the fit is drawn a little towards where it began.
    assert error(fitted) < error(costs) / 20
    for choice in fit_costs.choices(measured, fitted):
        assert choice.loss < 1.01


def test_a_search_chooses_better_than_where_it_began(tmp_path: Path) -> None:
    # Every fourth candidate of each layer: a search estimates all of them at every step.
    measured = fit_costs.read(sweep(tmp_path / "sweep.json"))[0][::4]
    # Far enough off that other candidates are chosen.
    off = replace(TRUTH, crowding=12 * TRUTH.crowding, step=0.1 * TRUTH.step)
    costs = {**{name: entry[2] for name, entry in fit_costs.KERNELS.items()}, "stream": off}

    def lost(constants: dict[str, object]) -> float:
        return geometric_mean(choice.loss for choice in fit_costs.choices(measured, constants))

    search = fit_costs.Search(measured, ["stream"])
    found = search.run(costs, 200, seed=1)
    assert found["bulk"] is costs["bulk"]
    assert lost(costs) > 1.05
    assert lost(found) < 1.02
    assert search.run(costs, 20, seed=2) == search.run(costs, 20, seed=2)
