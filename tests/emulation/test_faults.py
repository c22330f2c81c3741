"""Faults planted into copies of the kernels: the emulation has to report every one of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.emulation.build import Builder
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
from tests.emulation.launching import KernelFault
from tests.testing.pairs import first_of_each


def report(builder: Builder, case: Case, sources: Path, schedules: int) -> str:
    """What the emulation says of ``sources``, in the first schedule that it says anything of."""
    for seed in range(schedules):
        try:
            error = run(builder, replace(case, seed=seed), sources)
        except KernelFault as fault:
            return str(fault)
        # NaN compares false with everything.
        if not error < bound(case.problem):
            return WRONG
    return "nothing"


def test_every_fault_has_a_place_in_the_sources(tmp_path: Path) -> None:
    for fault in FAULTS:
        fault.plant(tmp_path)


# Every time: in each source, for each kernel, one that makes the result wrong and one that does worse.
@pytest.mark.parametrize(
    "fault",
    first_of_each(FAULTS, lambda fault: (fault.case.config.function, fault.file, fault.reported == WRONG)),
    ids=lambda fault: f"{fault.case.config.function}, {fault.name}",
)
def test_a_planted_fault_is_reported(builder: Builder, tmp_path: Path, fault: Fault) -> None:
    fault.plant(tmp_path)
    found = report(builder, fault.case, tmp_path, schedules=4)
    assert re.search(fault.reported, found, re.DOTALL), found


@pytest.mark.parametrize("case", [STREAM, CLUSTERED, UNBIASED, BULK, SPLIT, PERSISTENT, EVEN], ids=str)
@pytest.mark.parametrize("dependent", [False, True])
def test_without_a_fault_there_is_nothing_to_report(builder: Builder, case: Case, dependent: bool) -> None:
    assert report(builder, replace(case, dependent=dependent), SOURCES, schedules=2) == "nothing"
