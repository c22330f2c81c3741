"""Which operator a weight gets, without needing the device that it is about."""

from __future__ import annotations

import re

import pytest
import torch

from marlinq.core.errors import EnvironmentProblem, UsageError
from marlinq.kernels import Device, KernelDecision
from marlinq.runtime import Decision, Setting, decide, load
from marlinq.runtime.operator_choice import summarize
from marlinq.runtime.operators import dense, operator, packed
from tests.kernels.problems import int4_problem
from tests.testing.runnable_folders import random_tuple, stored_weight

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")
NUMBERS = Device("sm_90a", 132, 232448, bandwidth=4e12)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """A GPU of which only the numbers are there; the problems that it was asked about."""
    asked: list[tuple[object, ...]] = []

    def explain(*problem: object) -> KernelDecision:
        asked.append(problem)
        return KernelDecision("stream", "tile 8x128", seconds=2e-6)

    monkeypatch.setattr(operator, "find_spec", lambda name: object())
    monkeypatch.setattr(packed, "explain", explain)
    monkeypatch.setattr(dense, "device_numbers", lambda index: NUMBERS)
    return asked


def decided(
    k: int = 64,
    n: int = 64,
    *,
    group_size: int = 32,
    bits: int = 4,
    symmetric: bool = True,
    setting: Setting | None = None,
    operator: str = "auto",
) -> Decision:
    q = random_tuple(k, n, group_size=group_size, bits=bits, symmetric=symmetric)
    return decide(stored_weight(q), setting or Setting(GPU, torch.float16), operator=operator)


def test_a_gpu_gets_the_kernel_for_the_padded_shape(hopper: list[tuple[object, ...]]) -> None:
    bfloat16 = Setting(GPU, torch.bfloat16)
    found = decided(200, 72, group_size=256, symmetric=False, setting=bfloat16)
    assert (found.operator, found.chosen.seconds) == ("w4a16", 2e-6)
    # 200 x 72 weights of two bytes, beside what any product takes.
    least = 3e-6 + 200 * 72 * 2 / 4e12
    assert [(other.operator, other.takes, other.seconds) for other in found.others] == [
        ("dense", True, pytest.approx(least))
    ]
    assert found.reason.startswith("stream kernel: tile 8x128; not dense: torch's product")
    decided(320, 72, group_size=192)
    # One row of x, N, K, the group that the kernel sees, and whether there are zero points.
    assert set(hopper) == {
        (GPU, int4_problem(1, 128, 256, -1, zeros=True, bfloat16=True)),
        (GPU, int4_problem(1, 128, 320, 64, zeros=False, bfloat16=False)),
    }


def test_the_faster_of_two_is_taken(
    hopper: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decided().operator == "w4a16"
    monkeypatch.setattr(packed, "explain", lambda *problem: KernelDecision("stream", "slow", seconds=1e-3))
    assert decided().operator == "dense"
    assert decided(operator="w4a16").operator == "w4a16"
    assert "as asked" in decided(operator="w4a16").reason


def test_an_old_gpu_multiplies_dense_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old(*_: object) -> None:
        raise EnvironmentProblem("compute capability 7.0; the kernels need 8.0 or later")

    monkeypatch.setattr(operator, "find_spec", lambda name: object())
    monkeypatch.setattr(packed, "explain", too_old)
    monkeypatch.setattr(dense, "device_numbers", too_old)
    found = decided()
    assert (found.operator, found.chosen.seconds) == ("dense", None)
    assert "not w4a16: compute capability 7.0" in found.reason


def test_a_missing_package_is_named_with_its_fix(
    hopper: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"CuPy is not installed.*\[cuda13\].*device cpu"):
        decided()
    assert decided(operator="dense").operator == "dense"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"group_size": 16}, "not w4a16: groups of 16: neither"),
        ({"setting": Setting(GPU, torch.float32)}, "not w4a16: .* not float32"),
        ({"setting": Setting(torch.device("mps"), torch.float16)}, "not w4a16: .* not on mps"),
        ({"setting": Setting(CPU, torch.float32)}, "not w4a16: a CPU runs its reference"),
    ],
)
@pytest.mark.parametrize("operator", ["auto", "w4a16"])
def test_weights_that_no_kernel_takes_run_dense(
    options: dict[str, object], reason: str, operator: str, hopper: list[tuple[object, ...]]
) -> None:
    found = decided(**options, operator=operator)
    if "reference" in reason and operator == "w4a16":
        assert found.operator == "w4a16"
        return
    assert found.operator == "dense"
    assert re.search(reason, found.reason)


def test_an_unknown_operator_is_a_usage_error() -> None:
    with pytest.raises(
        UsageError, match="expected auto, dense, w4a16, w8a16, fp4a16, int4pack, sparse-w4a16, found 'w4'"
    ):
        decided(operator="w4")
    with pytest.raises(UsageError, match="found 'w4'"):
        load("nowhere", operator="w4")


def test_the_summary_counts_equal_decisions() -> None:
    on_cpu = Setting(CPU, torch.float32)
    plain, wide = decided(setting=on_cpu), decided(group_size=16, setting=on_cpu)
    lines = summarize([wide, plain, plain])
    assert [line.partition(" ")[0] for line in lines] == ["2", "1"]
    assert "groups of 16" in lines[1]
