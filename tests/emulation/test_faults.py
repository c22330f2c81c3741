"""Faults planted into the kernels of products: the emulation has to report every one of them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from emulation.build import Builder
from emulation.faults import Planted, sites
from emulation.launching import KernelFault
from tests.emulation.faults import (
    BULK,
    CLUSTERED,
    EVEN,
    FAULTS,
    PERSISTENT,
    SPLIT,
    STREAM,
    UNBIASED,
    WRONG,
    Fault,
)
from tests.emulation.gemm import SOURCES, Case, bound, run
from tests.testing.pairs import first_of_each, in_turn


def report(builder: Builder, case: Case, planted: Planted | None, schedules: int) -> str:
    """The emulation's report of the first schedule that it reports anything of."""
    for seed in range(schedules):
        try:
            error = run(builder, replace(case, seed=seed), planted)
        except KernelFault as fault:
            return str(fault)
        # NaN compares false with everything.
        if not error < bound(case.problem):
            return WRONG
    return "nothing"


SITES = sites(SOURCES)


# Every time: in each source one that makes the result wrong and one that does worse.
@pytest.mark.parametrize(
    "fault",
    first_of_each(FAULTS, lambda fault: (SITES[fault.planted.site], fault.reported == WRONG)),
    ids=lambda fault: f"{fault.case.config.function}, {fault.name}",
)
def test_a_planted_fault_is_reported(builder: Builder, fault: Fault) -> None:
    found = report(builder, fault.case, fault.planted, schedules=4)
    assert re.search(fault.reported, found, re.DOTALL), found


@pytest.mark.parametrize(
    ("case", "dependent"),
    in_turn((STREAM, CLUSTERED, UNBIASED, BULK, SPLIT, PERSISTENT, EVEN), (False, True)),
    ids=str,
)
def test_without_a_fault_there_is_nothing_to_report(builder: Builder, case: Case, dependent: bool) -> None:
    assert report(builder, replace(case, dependent=dependent), None, schedules=2) == "nothing"
