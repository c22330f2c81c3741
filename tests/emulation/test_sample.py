"""The sampler's kernel on the emulation: the tokens of the reference in torch, whatever the schedule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from emulation.build import Builder
from emulation.faults import Planted
from emulation.launching import EmulatedKernel, KernelFault, Memory, apart
from marlinq.kernels.launch.token_sampling import THREADS, SamplerState, SampleTensors, sample_config
from marlinq.runtime.sampling import FAULT, GREEDY, RING, Sampler, Sampling
from tests.emulation.gemm import SOURCES
from tests.testing.pairs import in_turn

# Every combination of what a variant is compiled for, with values that leave several tokens.
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy, penalty": Sampling(repetition_penalty=1.7),
    "drawn": Sampling(temperature=0.9, seed=2**63 + 5),
    "drawn, penalty": Sampling(temperature=1.3, repetition_penalty=0.6, seed=3),
    "top-k": Sampling(temperature=2.0, top_k=7, seed=4),
    "top-p": Sampling(temperature=1.1, top_p=0.6, seed=5),
    "min-p": Sampling(temperature=1.5, min_p=0.1, seed=6),
    "all": Sampling(temperature=1.2, top_k=40, top_p=0.8, min_p=0.02, repetition_penalty=1.2, seed=7),
}
STREAMS = (5, 0, 2**31 + 9)


def state_of(sampling: Sampling, batch: int, vocabulary: int, drawn: int) -> Sampler:
    """A sampler in the middle of a text."""
    sampler = Sampler(sampling.shape, batch, vocabulary, torch.device("cpu"))
    prompts = torch.randint(vocabulary, (batch, 50)).tolist()
    sampler.begin(sampling, prompts, STREAMS[:batch])
    sampler.state.drawn.fill_(drawn)
    return sampler


def emulate(
    builder: Builder,
    logits: Tensor,
    sampler: Sampler,
    *,
    clusters: bool = True,
    seed: int = 0,
    planted: Planted | None = None,
) -> None:
    """Runs what :func:`marlinq.kernels.launch.token_sampling.sample_tokens` launches, on watched copies."""
    state = SamplerState(*(apart(tensor) if tensor.numel() else tensor for tensor in sampler.state))
    tensors = SampleTensors(apart(logits), state)
    config = sample_config(tensors, clusters=clusters, **sampler.shape._asdict())
    memory = [
        Memory("logits", tensors.logits, after_previous=True),
        Memory("values", state.values),
        Memory("numbers", state.numbers),
        Memory("drawn", state.drawn, writable=True, after_previous=True, holds_values=True),
        Memory("tokens", state.tokens, writable=True, after_previous=True),
        Memory("ring", state.ring, writable=True, after_previous=True),
    ]
    if sampler.shape.penalty:
        memory.append(Memory("seen", state.seen, writable=True, after_previous=True, holds_values=True))
    text = config.instantiation().text()
    library = builder.kernel(text, "sample", SOURCES, 90 if clusters else 80, planted)
    EmulatedKernel(library).launch(
        logits.shape[0] * config.cluster,
        THREADS,
        config.shared_bytes,
        tensors.arguments(),
        memory,
        dependent=clusters,
        seed=seed,
    )
    for mine, theirs in zip(sampler.state, state, strict=True):
        mine.copy_(theirs)


def check(
    builder: Builder,
    sampling: Sampling,
    logits: Tensor,
    *,
    drawn: int = 0,
    clusters: bool = True,
    seed: int = 0,
) -> Tensor:
    """The ring's row, from kernel and reference alike."""
    torch.manual_seed(seed)
    expected = state_of(sampling, logits.shape[0], logits.shape[1], drawn)
    torch.manual_seed(seed)
    found = state_of(sampling, logits.shape[0], logits.shape[1], drawn)
    expected.sample(logits)
    emulate(builder, logits, found, clusters=clusters, seed=seed)
    for name in expected.state._fields:
        assert torch.equal(getattr(found.state, name), getattr(expected.state, name)), name
    return found.state.ring[drawn % RING]


def normal(batch: int, vocabulary: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (3 * torch.randn(batch, vocabulary, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_the_reference(builder: Builder, name: str) -> None:
    # The ring begins anew after RING tokens.
    logits = normal(2, 3000, torch.float16, seed=1)
    assert check(builder, SAMPLINGS[name], logits, drawn=RING + 6, seed=1).min() >= 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    in_turn(("greedy", "drawn, penalty", "all"), (torch.float16, torch.bfloat16, torch.float32)),
)
def test_every_type_and_rows_that_are_not_aligned(builder: Builder, name: str, dtype: torch.dtype) -> None:
    wide = normal(3, 1003, dtype)
    check(builder, SAMPLINGS[name], wide[:, :1000])
    check(builder, SAMPLINGS[name], wide)


@pytest.mark.parametrize("name", ["greedy", "drawn", "all"])
def test_gpus_without_clusters(builder: Builder, name: str) -> None:
    check(builder, SAMPLINGS[name], normal(2, 3000, torch.bfloat16), clusters=False)


def rows(values: Sequence[float], vocabulary: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[1, vocabulary]: ``values`` at spread places among ones far below."""
    logits = torch.full((1, vocabulary), -50.0)
    logits[0, torch.arange(len(values)) * (vocabulary // len(values))] = torch.tensor(values)
    return logits.to(dtype)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.0, top_k=100000),
        Sampling(temperature=1.0, top_p=1e-6),
        Sampling(temperature=1.0, top_p=0.999999),
        Sampling(temperature=1.0, min_p=1.0),
        GREEDY,
    ],
)
def test_ties_and_extremes(builder: Builder, sampling: Sampling) -> None:
    for values in ([1.0] * 8, [4.0, 4.0, 3.0, 3.0, 3.0, -40.0], [1e30, -1e30, float("-inf"), 1e30]):
        check(builder, sampling, rows(values, 1200))
    check(builder, sampling, torch.zeros(1, 700))


@pytest.mark.parametrize(
    ("name", "value"), in_turn(("greedy", "drawn", "all"), (float("nan"), -float("nan"), float("inf")))
)
def test_infinite_and_nan_logits_are_reported(builder: Builder, name: str, value: float) -> None:
    logits = normal(2, 3000, torch.float16)
    logits[1, 2222] = value
    sampler = state_of(SAMPLINGS[name], 2, 3000, 0)
    emulate(builder, logits, sampler)
    assert sampler.state.ring[0].tolist()[1] == FAULT
    assert sampler.state.ring[0].tolist()[0] >= 0
    assert 0 <= int(sampler.state.tokens[1]) < 3000
    nothing = torch.full((1, 100), -float("inf"))
    sampler = state_of(SAMPLINGS[name], 1, 100, 0)
    emulate(builder, nothing, sampler)
    assert int(sampler.state.ring[0, 0]) == FAULT


FAULTS = {
    "other blocks' sums read without waiting for them": Planted("sample_blocks_met", "__syncthreads();"),
    "a block that ends while others read its memory": Planted("sample_memory_read", ";"),
    "bins summed before all threads have counted": Planted("bins_counted"),
    "logits read while the previous kernel writes them": Planted("sample_waits"),
    "two threads that count in one bin": Planted("bins_of_thread", "thread / 2"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported(builder: Builder, name: str) -> None:
    sampler = state_of(SAMPLINGS["top-p"], 1, 3000, 0)
    with pytest.raises(KernelFault):
        emulate(builder, normal(1, 3000, torch.float16), sampler, planted=FAULTS[name])
