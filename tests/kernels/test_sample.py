"""The sampler's kernel: compiled for every architecture; on a GPU the reference's tokens, and their time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from marlinq.kernels import ARCHITECTURES, Device, compile_kernel
from marlinq.kernels.contract.instantiation import Instantiation
from marlinq.kernels.launch import token_sampling as launching
from marlinq.kernels.launch.token_sampling import SampleConfig, SamplerState, SampleTensors, sample_config
from marlinq.runtime.sampling import (
    FAULT,
    GREEDY,
    RING,
    Sampler,
    Sampling,
    choose,
    precompile_sampler,
)
from tests.testing.architectures import MAIN, QUICK

ELEMENTS = {"Half": 2, "Bfloat16": 2, "Float32": 4}
# As many bytes as a block may have on the GPUs with the least shared memory.
LEAST_SHARED_BYTES = 101_376


def variants(*, whole: bool) -> Iterator[tuple[str, SampleConfig]]:
    """Samplers by architecture: all shapes on the one that kernels are written for, while neighbours among
    the others share them. Types and alignment in turn. Unless ``whole``, one shape for each of a few
    architectures, with everything on the main one."""
    shapes = [flags for flags in itertools.product((False, True), repeat=3) if flags[0] or not flags[1]]
    for place, architecture in enumerate(ARCHITECTURES):
        for number, (draws, filters, penalty) in enumerate(shapes):
            if whole:
                left_out = architecture != "sm_90a" and (place + number) % 2
            else:
                wanted = {"sm_80": 0, MAIN: len(shapes) - 1, "sm_120a": 2}
                left_out = number != wanted.get(architecture)
            if left_out:
                continue
            element, size = list(ELEMENTS.items())[(place + number) % 3]
            aligned = (place // 2 + number) % 2 == 0
            clusters = int(architecture.strip("sm_a")) >= 90
            config = SampleConfig(element, size, RING, draws, filters, penalty, aligned, clusters)
            yield architecture, config


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_variant_spills_on_any_architecture(whole: bool) -> None:
    def trouble(variant: tuple[str, SampleConfig]) -> str:
        architecture, config = variant
        compiled = compile_kernel(config.instantiation(), architecture)
        wrong = compiled.spill_bytes or compiled.stack_bytes
        return f"{architecture} {config}: {compiled.log}" if wrong else ""

    chosen = list(variants(whole=whole))
    assert {architecture for architecture, _ in chosen} == set(ARCHITECTURES if whole else QUICK)
    with ThreadPoolExecutor(2) as pool:
        assert not [found for found in pool.map(trouble, chosen) if found]
    assert max(config.shared_bytes for _, config in chosen) <= LEAST_SHARED_BYTES


def test_logits_that_the_kernel_cannot_read_are_refused() -> None:
    state = Sampler(GREEDY.shape, 2, 8, torch.device("cpu")).state
    for logits in (torch.zeros(2, 8, dtype=torch.int32), torch.zeros(8, 2).T):
        with pytest.raises(ValueError, match="logits: expected float16"):
            sample_config(
                SampleTensors(logits, state), draws=False, filters=False, penalty=False, clusters=True
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [64, 61])
def test_the_variant_that_is_compiled_ahead_is_the_one_that_is_launched(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, vocabulary: int
) -> None:
    found: list[Instantiation] = []
    monkeypatch.setattr(launching, "compile_missing", lambda _, wanted: found.extend(wanted))
    monkeypatch.setattr(launching, "device_numbers", lambda _: Device("sm_90a", 132, 232_448))
    for chosen in SAMPLINGS:
        precompile_sampler(chosen.shape, dtype, vocabulary, 0)
        state = Sampler(chosen.shape, 3, vocabulary, torch.device("cpu")).state
        tensors = SampleTensors(torch.zeros(3, vocabulary, dtype=dtype), state)
        config = sample_config(tensors, **chosen.shape._asdict(), clusters=True)
        assert found.pop() == config.instantiation()
        assert not found


SAMPLINGS = [
    GREEDY,
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.0, top_k=50, seed=2),
    Sampling(temperature=1.0, top_p=0.9, seed=3),
    Sampling(temperature=1.2, min_p=0.05, seed=4),
    Sampling(temperature=1.1, top_k=200, top_p=0.95, min_p=0.01, repetition_penalty=1.1, seed=5),
]


def on_cpu(state: SamplerState) -> SamplerState:
    return SamplerState(*(tensor.cpu() for tensor in state))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_gpu_draws_what_the_cpu_draws(sampling: Sampling, dtype: torch.dtype) -> None:
    """But where two noisy logits, or the mass at a filter's edge, are closer than float32 can tell, since
    logarithms and exponentials of GPU and CPU differ by an ulp: about one draw in a million."""
    for batch, vocabulary in ((1, 128256), (7, 50257), (64, 1000)):
        sampler = Sampler(sampling.shape, batch, vocabulary, torch.device("cuda"))
        prompts = torch.randint(vocabulary, (batch, 20)).tolist()
        sampler.begin(sampling, prompts, range(batch))
        for step in range(4):
            logits = (3 * torch.randn(batch, vocabulary, device="cuda")).to(dtype)
            expected, fault = choose(logits.cpu(), sampling.shape, on_cpu(sampler.state))
            sampler.sample(logits)
            assert not fault.any()
            assert torch.equal(sampler.state.tokens.cpu(), expected)
            assert torch.equal(sampler.state.ring[step].cpu(), expected)
            assert sampler.state.drawn.tolist() == [step + 1] * batch


@pytest.mark.gpu
def test_faults_are_reported_on_the_gpu() -> None:
    for sampling in SAMPLINGS:
        sampler = Sampler(sampling.shape, 3, 5000, torch.device("cuda"))
        sampler.begin(sampling, [[1]] * 3, range(3))
        logits = torch.randn(3, 5000, device="cuda", dtype=torch.float16)
        logits[1, 4000], logits[2, 77] = float("nan"), float("inf")
        sampler.sample(logits)
        assert [token == FAULT for token in sampler.state.ring[0].tolist()] == [False, True, True]


@pytest.mark.gpu
@pytest.mark.timed
@pytest.mark.parametrize(
    ("sampling", "microseconds"),
    [
        (GREEDY, 10),
        (Sampling(temperature=1.0), 25),
        (Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1), 80),
    ],
)
def test_a_token_takes_microseconds(sampling: Sampling, microseconds: float) -> None:
    """Time for a vocabulary of 128,256 in a replayed graph; a bound for regressions, not a figure."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("one block works on a row there")
    sampler = Sampler(sampling.shape, 1, 128256, torch.device("cuda"))
    sampler.begin(sampling, [[1, 2, 3]], [0])
    logits = 3 * torch.randn(1, 128256, device="cuda", dtype=torch.float16)
    sampler.sample(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            sampler.sample(logits)
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    found = begin.elapsed_time(end) * 10
    print(f"{sampling}: {found:.1f} us")
    assert found < microseconds
