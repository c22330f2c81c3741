"""The kernel bench: shapes, what contenders are given, what the report says, what a CPU measures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from marlinq.core.errors import UsageError
from marlinq.core.granularity import Granularity
from marlinq.core.progress import no_progress
from marlinq.kernels import GROUP_SIZES, compile_kernel
from marlinq.kernels.contract.instantiation import cold_read
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.operations.bench import Cell, KernelBench, bench_kernels, contest, kernels
from marlinq.operations.bench.peers import PEERS
from marlinq.operations.bench.peers.contenders import Run
from marlinq.operations.bench.peers.own import Marlinq
from marlinq.operations.bench.shapes import MODELS, LinearSize, dividing_group_size, layers_of
from marlinq.operations.bench.weights import Weight, random_weight
from tests.testing.architectures import QUICK_FIRST

CPU = torch.device("cpu")


def weight_of(group_size: int, *, asymmetric: bool = False, dtype: torch.dtype = torch.float16) -> Weight:
    torch.manual_seed(0)
    granularity = Granularity.from_group_size(group_size)
    return random_weight(
        LinearSize("small", 192, 256),
        granularity,
        asymmetric=asymmetric,
        dtype=dtype,
        device=CPU,
        weight_format=INT4,
    )


def test_shapes_follow_from_dimensions() -> None:
    # The layers of the two Llama 3 models as their model cards' weights have them.
    assert [(layer.n, layer.k) for layer in layers_of(["llama-3-8b"], [], 128)] == [
        (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
    ]  # fmt: skip
    assert [(layer.n, layer.k) for layer in layers_of(["llama-3-70b"], [], 128)] == [
        (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)
    ]  # fmt: skip
    assert layers_of([], ["64x128", "mine=128x64"], 64) == (
        LinearSize("64x128", 64, 128),
        LinearSize("mine", 128, 64),
    )


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_measured_in_groups_of_64(model: str) -> None:
    assert all(layer.n % 64 == 0 and layer.k % 64 == 0 for layer in layers_of([model], [], 64))


@pytest.mark.parametrize(
    ("models", "shapes", "message"),
    [
        (["gpt-5"], [], "model 'gpt-5' is not known"),
        ([], ["64"], "expected NxK"),
        ([], ["65x128"], "N=65"),
        ([], ["0x128"], "N=0"),
        (["smollm2-135m"], [], "K=576 is not a multiple of group size 128"),
        ([], [], "nothing to measure"),
    ],
)
def test_refused_layers(models: list[str], shapes: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layers_of(models, shapes, 128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "expected float16 or bfloat16"),
        ({"group_size": 48}, "group size 48"),
        ({"against": ["fast"]}, "peer 'fast' is not known"),
        ({"batches": [0]}, "at least 1"),
        ({"device": "meta"}, "expected auto, cpu, cuda or cuda:N"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench_kernels(["llama-3-8b"], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("asymmetric", [False, True])
def test_peers_get_the_same_weight(group_size: int, asymmetric: bool) -> None:
    weight = weight_of(group_size, asymmetric=asymmetric)
    codes = weight.codes().float()
    assert (int(codes.min()), int(codes.max())) == (1, 15)
    scales, zeros = weight.natural_scales(), weight.natural_zeros()
    size = 256 if group_size == -1 else group_size
    spread = torch.full_like(scales, 8.0) if zeros is None else zeros.float()
    rebuilt = (codes - spread.repeat_interleave(size, 0)) * scales.float().repeat_interleave(size, 0)
    torch.testing.assert_close(rebuilt, weight.dense(), rtol=0, atol=0)
    # Products of unit activations stay near one, so that chains neither vanish nor overflow.
    assert 0.5 < float(rebuilt.square().sum(0).mean()) < 2


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float16, 1e-3), (torch.bfloat16, 5e-3)], ids=["float16", "bfloat16"]
)
def test_contenders_agree(dtype: torch.dtype, tolerance: float) -> None:
    weight = weight_of(64, asymmetric=True, dtype=dtype)
    x = torch.randn(5, 256).to(dtype)
    expected = x.float() @ weight.dense()
    for contender in (Marlinq(), *(PEERS[name] for name in ("cublas", "batch-invariant", "act-order"))):
        run = contender.prepare(weight, 2, [5])
        for copy in range(2):
            found = run(copy, x)
            assert (found.float() - expected).norm() / expected.norm() < tolerance
    assert PEERS["cublas"].nbytes(weight) == 2 * 192 * 256
    assert Marlinq().nbytes(weight) == 192 * 256 // 2 + 2 * 2 * 4 * 192


def test_tinygemm_says_what_it_takes() -> None:
    peer = PEERS["tinygemm"]
    assert "bfloat16 only" in (peer.unavailable(torch.float16, 128, False) or "")
    assert "groups" in (peer.unavailable(torch.bfloat16, -1, False) or "")
    assert peer.unavailable(torch.bfloat16, 128, False) is None


def cell(layer: str, m: int, floor: float, **seconds: float) -> Cell:
    return Cell(layer, m, 64, 128, 1000, floor, seconds, dict.fromkeys(seconds, 1e-4))


@pytest.fixture
def report() -> KernelBench:
    cells = (
        cell("a", 1, 1e-6, marlinq=2e-6, cublas=4e-6, humming=3e-6),
        cell("a", 8, 1e-6, marlinq=2e-6, cublas=4e-6),
        cell("b", 1, 2e-6, marlinq=16e-6, cublas=8e-6, humming=4e-6),
        cell("b", 8, 2e-6, marlinq=4.1e-6, cublas=4e-6),
    )
    names = ("marlinq", "cublas", "humming")
    return KernelBench(
        "a GPU", "float16", "int4", 64, False, names, {"a": 1e-6, "b": 2e-6}, 1e15, cells, ("a note",)
    )


def test_a_report_holds_means_and_cells_behind_a_peer(report: KernelBench) -> None:
    means = report.geometric_means()
    assert means["marlinq"] == pytest.approx({1: math.sqrt(2 * 8), 8: math.sqrt(2 * 2.05)})
    assert means["humming"] == pytest.approx({1: math.sqrt(3 * 2)})
    assert means["best peer"] == pytest.approx({1: math.sqrt(3 * 2), 8: math.sqrt(4 * 2)})
    # 2.5% behind is within the margin.
    assert [(found.layer, found.m, found.best_peer) for found in report.behind()] == [("b", 1, "humming")]
    value = json.loads(json.dumps(report.to_dict()))
    assert value["behind"] == [{"layer": "b", "m": 1, "peer": "humming", "ratio": pytest.approx(4)}]
    assert report.cells[0].bandwidth == pytest.approx(1000 / 2e-6)
    assert report.cells[0].rate == pytest.approx(2 * 64 * 128 / 2e-6)


def test_rendering_leaves_gaps_open(report: KernelBench) -> None:
    text = report.render()
    assert "peak 1000 TFLOP/s" in text
    assert "1 of 4 cells more than 3% behind the best peer:\nb M=1: 4.000 x humming" in text
    (row,) = [line for line in text.splitlines() if line.split()[:3] == ["a", "8", "1.00"]]
    assert row.split()[3:6] == ["2.00", "4.00", "-"]
    assert text.endswith("a GPU\na note")


def test_cpu_measures_the_reference_and_says_so() -> None:
    stages: list[str] = []
    with pytest.warns(UserWarning, match="8 cells were skipped"):
        found = bench_kernels(
            ["smollm2-135m"], batches=[64, 1], device="cpu", group_size=64, explain=True, shapes=["64x128"],
            progress=lambda stage, done, total: stages.append(f"{stage} {done}/{total}"),
        )  # fmt: skip
    assert [(each.layer, each.m) for each in found.cells] == [("smollm2-135m o", 1), ("64x128", 1)]
    for each in found.cells:
        assert each.floor_seconds is None
        assert each.errors["marlinq"] < 1e-3
        assert each.reason is not None
        assert "no CUDA kernels" in each.reason
    assert stages == ["kernels 1/2", "kernels 2/2"]
    assert "no GPU was used" in found.render()
    assert json.dumps(found.to_dict())


@pytest.mark.parametrize("architecture", QUICK_FIRST)
def test_cold_read_compiles_without_spills(architecture: str) -> None:
    compiled = compile_kernel(cold_read(threads=1024, unroll=4), architecture)
    assert compiled.spill_bytes == 0
    assert compiled.registers <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gpu_measures_everything_that_runs(dtype: str) -> None:
    found = bench_kernels(
        [],
        shapes=["o=2048x2048"],
        batches=[1, 16, 130],
        against=["cublas", "tinygemm"],
        dtype=dtype,
        explain=True,
    )
    expected = {"marlinq", "cublas"} | ({"tinygemm"} if dtype == "bfloat16" else set())
    assert set(found.contenders) == expected
    for each in found.cells:
        assert each.floor_seconds is not None
        assert each.seconds["marlinq"] > 0.5 * each.floor_seconds
        assert each.errors["marlinq"] < (1e-3 if dtype == "float16" else 5e-3)
        assert each.reason is not None
        assert "us" in each.reason


class Faulty:
    """A contender that is wrong, or fails, in a chosen way."""

    def __init__(self, name: str, fault: str) -> None:
        self.name, self.fault = name, fault

    def unavailable(self, dtype: torch.dtype, group_size: int, asymmetric: bool) -> str | None:
        return "no such hardware" if self.fault == "unavailable" else None

    def nbytes(self, weight: Weight) -> int:
        return weight.nbytes

    def prepare(self, weight: Weight, copies: int, batches: Sequence[int]) -> Run:
        if self.fault == "prepare":
            raise KeyError("lost")
        dense = weight.dense() * (1.01 if self.fault == "wrong" else 1.0)

        def run(copy: int, x: torch.Tensor) -> torch.Tensor:
            if self.fault == "run":
                raise RuntimeError("no kernel\nfor this")
            out = (x.float() @ dense).to(x.dtype)
            return out[:, 1:] if self.fault == "shape" else out

        return run


def test_faulty_peers_are_reported_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = ("wrong", "shape", "run", "prepare", "unavailable", "none")
    monkeypatch.setattr(kernels, "PEERS", {fault: Faulty(fault, fault) for fault in faults})
    # Everything that needs a GPU but the flow itself.
    monkeypatch.setattr(kernels, "precompile", lambda problems, index: 0)
    monkeypatch.setattr(kernels, "peak_rate", lambda device, dtype: 1e12)
    monkeypatch.setattr(kernels, "cold_read_seconds", lambda words, scales: 1e-6)
    monkeypatch.setattr(kernels, "copies_for", lambda size, device: 2)
    monkeypatch.setattr(contest, "capture", lambda launch, launches: launch(launches - 1))
    monkeypatch.setattr(
        contest,
        "time_in_turn",
        lambda graphs, expected, sustained: dict.fromkeys(graphs, (4 if sustained else 2) * expected),
    )
    setting = kernels._Setting(CPU, torch.float16, INT4, Granularity.group(64), True, explain=False)
    found = kernels._on_gpu(setting, (LinearSize("l", 64, 128),), (1, 20), faults, no_progress)
    assert found.contenders == ("marlinq", "none")
    assert [each.floor_seconds for each in found.cells] == [1e-6, 1e-6]
    assert [each.ratio("none") for each in found.cells] == pytest.approx([3, 3])
    text = found.render()
    assert "unavailable was left out: no such hardware" in text
    assert "wrong is wrong on l M=20: relative error 0.01, at most 4e-03 expected; not timed" in text
    assert "shape is wrong on l M=1: relative error inf" in text
    assert "run failed on l M=1: RuntimeError: no kernel\n" in text
    assert "prepare could not prepare l: KeyError: 'lost'" in text
    assert "no cell is more than 3% behind" in text
    assert "as long at rest after each" in text
    sustained = replace(setting, sustained=True)
    found = kernels._on_gpu(sustained, (LinearSize("l", 64, 128),), (1,), ("none",), no_progress)
    assert found.cells[0].ratio("none") == pytest.approx(6)
    assert "no rests: at the power limit" in found.render()


def test_the_default_group_divides_every_layer() -> None:
    for model in MODELS:
        assert layers_of([model], [], dividing_group_size([model], []))
    assert dividing_group_size(["llama-3-8b"], []) == 128
    # 576 input channels.
    assert dividing_group_size(["smollm2-135m"], []) == 64
