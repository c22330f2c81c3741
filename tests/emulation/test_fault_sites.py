"""Fault sites of the sources: each has a planted fault, and each planted fault has its site."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulation.build import Builder
from emulation.faults import Planted, UnknownSite, sites
from tests.emulation import (
    faults,
    test_attention,
    test_convolution,
    test_delta,
    test_eight_bits,
    test_expert_faults,
    test_latent,
    test_layer_inputs,
    test_mamba,
    test_other_elements,
    test_panel,
    test_residual,
    test_router,
    test_router_inputs,
    test_rows,
    test_sample,
    test_tuned,
    test_warpgroup_fp8,
)
from tests.emulation.gemm import SOURCES

PLANTED: list[Planted] = [
    *(fault.planted for fault in faults.FAULTS),
    *(fault.planted for fault in test_expert_faults.FAULTS.values()),
    *(planted for planted, _ in test_attention.FAULTS.values()),
    *(planted for planted, _ in test_eight_bits.ROW_FAULTS.values()),
    *test_eight_bits.PLAIN_FAULTS.values(),
    *test_eight_bits.FRAGMENT_FAULTS.values(),
    *(planted for _, planted in test_warpgroup_fp8.FAULTS.values()),
    *(planted for planted, *_ in test_other_elements.FAULTS.values()),
    *test_panel.FAULTS.values(),
    *test_residual.FAULTS.values(),
    *test_router.CHOICE_FAULTS.values(),
    *(planted for _, planted in test_router.CORRECTION_FAULTS.values()),
    *(planted for _, planted in test_router.GROUP_FAULTS.values()),
    *test_router_inputs.ADDITION_FAULTS.values(),
    *test_router_inputs.GATE_FAULTS.values(),
    test_router_inputs.SHARED_FAULT,
    *(planted for _, _, planted, _ in test_rows.FAULTS.values()),
    *test_sample.FAULTS.values(),
    *(planted for planted, _ in test_other_elements.SPARSE_FAULTS.values()),
    *test_convolution.FAULTS,
    *test_delta.FAULTS,
    *test_layer_inputs.FAULTS,
    *test_mamba.FAULTS,
    *(planted for _, planted in test_latent.FAULTS.values()),
    test_latent.UNMASKED,
    *test_tuned.FAULTS.values(),
]
"""Every fault that a test plants into the shipped sources."""


def test_every_site_has_a_fault_and_every_fault_a_site() -> None:
    assert {planted.site for planted in PLANTED} == set(sites(SOURCES))


def test_a_site_is_its_text_and_costs_nothing(builder: Builder, tmp_path: Path) -> None:
    for source in sorted(SOURCES.rglob("*.cuh")):
        preprocessed = builder.preprocess(f'#include "{source.relative_to(SOURCES)}"\n', "every.cu", SOURCES)
        assert "FAULT_SITE" not in preprocessed


def test_two_sites_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("first.cuh", "second.cuh"):
        (tmp_path / name).write_text("FAULT_SITE(barrier, __syncthreads();)\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"barrier is in first\.cuh and in second\.cuh"):
        sites(tmp_path)


def test_a_fault_without_its_site_is_an_error(builder: Builder) -> None:
    text = 'extern "C" __global__ void nothing(int* out) { out[threadIdx.x] = 0; }\n'
    with pytest.raises(UnknownSite, match="nothing has no fault site stream_waits"):
        builder.kernel(text, "nothing", SOURCES, planted=Planted("stream_waits"))
