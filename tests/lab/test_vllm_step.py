"""A decode step's kernels by class, from a profile."""

from __future__ import annotations

import pytest

from lab.runtime.vllm_step import MEASURED, OTHERS, Ran, class_of, dissect


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("triton_red_fused_fused_add_rms_norm_w4a16_gemm_1", "norms, rotary, activation"),
        ("w4a16_bulk", "linear layers"),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>", "sums over GPUs"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "sums over GPUs"),
        ("void marlin_moe_wna16::Marlin<1125899906909960l", "routed experts"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<", "attention"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int", "linear layers"),
        ("Memcpy HtoD (Pinned -> Device)", OTHERS),
    ],
)
def test_classes(name: str, found: str) -> None:
    assert class_of(name) == found


def test_overlap_counts_once_and_gaps_are_idle() -> None:
    ran = []
    for step in range(MEASURED + 3):
        start = 100.0 * step
        ran += [
            Ran(start, start + 10, "ArgMaxOps"),
            Ran(start + 20, start + 60, "experts_wgmma"),
            # Begun 20 microseconds before the kernel ahead ends.
            Ran(start + 40, start + 70, "experts_sum"),
        ]
    found = dissect(ran, 0.1)
    assert (found.milliseconds, found.profiled_us) == (0.1, 100.0)
    assert found.classes == {"routed experts": (50.0, 2.0), OTHERS: (10.0, 1.0)}
    assert found.idle_us == pytest.approx(40.0)
