"""The persistent decode step: compiled without spills; on a GPU against float64, captured and again."""

from __future__ import annotations

import pytest
import torch

from marlinq.core.granularity import Granularity
from marlinq.kernels import compile_kernel
from marlinq.kernels.launch import persistent
from marlinq.kernels.launch.persistent import Model, PersistentLayers
from tests.kernels.persistent_problems import Features, Reference, Sizes, bound, random_layer

H200_SHARED_BYTES = 232_448
SIZES = Sizes(1024, 2816, 16, 4, 64, 640)


# Size of a head, group, zero points, bfloat16, and the cap of scores.
FEATURES: list[tuple[int, int, bool, bool, float | None]] = [
    (128, 64, True, False, 30.0),
    (128, 128, False, False, None),
    (64, 32, True, True, None),
    (128, 128, False, True, None),
]


@pytest.mark.parametrize(
    "features", [FEATURES[0], *(pytest.param(features, marks=pytest.mark.slow) for features in FEATURES[1:])]
)
def test_the_kernel_does_not_spill(features: tuple[int, int, bool, bool, float | None]) -> None:
    head_dim, group, zeros, bfloat16, softcap = features
    model = Model(32, 8, 1e-5, 0.1, softcap=softcap)
    config = persistent.choose(
        [4096, 4096, 4096, 14336],
        model,
        head_dim,
        Granularity.from_group_size(group),
        zeros=zeros,
        bfloat16=bfloat16,
        shared_bytes=H200_SHARED_BYTES,
    )
    assert config is not None
    compiled = compile_kernel(config.instantiation, "sm_90a")
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


@pytest.mark.slow
def test_the_kernel_for_gemma_does_not_spill() -> None:
    config = persistent.choose(
        [3840, 4096, 3840, 15360],
        Model(16, 8, 1e-6, 0.1, "gelu_tanh", narrow_first=False, post_norms=True),
        256,
        Granularity.group(128),
        zeros=False,
        bfloat16=True,
        shared_bytes=H200_SHARED_BYTES,
    )
    assert config is not None
    compiled = compile_kernel(config.instantiation, "sm_90a")
    assert (compiled.spill_bytes, compiled.stack_bytes) == (0, 0)


def test_shared_memory_is_enough_for_what_is_chosen() -> None:
    for channels in ((4096, 4096, 4096, 14336), (8192, 8192, 8192, 28672), (512, 512, 512, 640)):
        config = persistent.choose(
            channels,
            Model(32, 8, 1e-5, 0.1),
            128,
            Granularity.group(128),
            zeros=False,
            bfloat16=False,
            shared_bytes=H200_SHARED_BYTES,
        )
        if config is not None:
            assert config.shared_bytes < H200_SHARED_BYTES
            assert config.stages % config.teams == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("length", [0, 3, 33, 500, 639])
def test_captured_steps_are_those_of_float64(dtype: torch.dtype, length: int) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the persistent kernel needs compute capability 9.0")
    torch.manual_seed(length)
    device = torch.device("cuda", torch.cuda.current_device())
    model = Model(SIZES.heads, SIZES.kv_heads, 1e-5, SIZES.head_dim**-0.5)
    features = Features(group=64, zeros=True, head_norms=True, dtype=dtype)
    layers = [random_layer(SIZES, features, 1, device) for _ in range(3)]
    given = torch.randn(1, SIZES.hidden, device=device).to(dtype)
    hidden = given.clone()
    on_device = torch.tensor([length], dtype=torch.int32, device=device)
    step = PersistentLayers(layers, model, hidden, on_device)
    step.launch()
    torch.cuda.synchronize()
    first = hidden.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden.copy_(given)
        step.launch()
    for _ in range(3):
        graph.replay()
        assert torch.equal(hidden, first)
    expected = Reference(model, [length], dtype).step(layers, given)
    assert float((first.double() - expected).norm() / expected.norm()) < bound(dtype, len(layers))
