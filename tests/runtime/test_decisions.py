"""Which path a weight takes, without needing the device that it is about."""

from __future__ import annotations

import pytest
import torch

from marlinq.core.errors import EnvironmentProblem
from marlinq.kernels import KernelDecision
from marlinq.runtime import decide, linear
from marlinq.runtime.linear import summarize
from tests.testing.runnable_folders import random_tuple

GPU = torch.device("cuda:0")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "find_spec", lambda name: object())


def test_a_gpu_gets_the_kernel_for_the_padded_shape(cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def explain(*problem: object) -> KernelDecision:
        asked.append(problem)
        return KernelDecision("stream", "tile 8x128")

    monkeypatch.setattr(linear, "explain", explain)
    q = random_tuple(200, 72, group_size=256, symmetric=False)
    found = decide(q, device=GPU, dtype=torch.bfloat16)
    assert (found.path, found.kernel, found.reason) == ("kernel", "stream", "for one token: tile 8x128")
    wide = random_tuple(320, 72, group_size=192)
    decide(wide, device=GPU, dtype=torch.float16)
    # One row of x, N, K, the group that the kernel sees, and whether there are zero points.
    assert asked == [
        (GPU, torch.bfloat16, 1, 128, 256, -1, True),
        (GPU, torch.float16, 1, 128, 320, 64, False),
    ]


def test_an_old_gpu_multiplies_dense_weights(cupy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(*problem: object) -> KernelDecision:
        raise EnvironmentProblem("compute capability 7.0; the kernels need 8.0 or later")

    monkeypatch.setattr(linear, "explain", explain)
    found = decide(random_tuple(64, 64, group_size=32), device=GPU, dtype=torch.float16)
    assert found.path == "dense"
    assert "compute capability 7.0" in found.reason


def test_a_missing_package_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    q = random_tuple(64, 64, group_size=32)
    with pytest.raises(EnvironmentProblem, match=r"CuPy is not installed.*marlinq\[cuda13\].*--device cpu"):
        decide(q, device=GPU, dtype=torch.float16)
    assert decide(q, device=GPU, dtype=torch.float16, linears="dense").path == "dense"


def test_what_the_kernel_does_not_take_runs_dense() -> None:
    q = random_tuple(64, 64, group_size=32)
    assert "not float32" in decide(q, device=GPU, dtype=torch.float32).reason
    assert "not on mps" in decide(q, device=torch.device("mps"), dtype=torch.float16).reason


def test_the_summary_counts_equal_decisions() -> None:
    plain = decide(random_tuple(64, 64, group_size=32), device=torch.device("cpu"), dtype=torch.float32)
    wide = decide(random_tuple(64, 64, group_size=16), device=torch.device("cpu"), dtype=torch.float32)
    lines = summarize([wide, plain, plain])
    assert [line.partition(" ")[0] for line in lines] == ["2", "1"]
    assert "group size 16" in lines[1]
