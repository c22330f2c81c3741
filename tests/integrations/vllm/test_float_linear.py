"""FP8 weights with 16-bit activations in the vLLM plugin, against the stub."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from marlinq.core.errors import EnvironmentProblem, UnsupportedError
from marlinq.integrations.vllm import register
from tests.integrations.vllm import stub

NAMES = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
CHANNEL, TENSOR = (-1, 1), (-1, -1)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that the stub's vLLM asks for FP8 weights on CUDA, in order, with the plugin's first."""
    possible = stub.install(monkeypatch)._POSSIBLE_WFP8A16_KERNELS[stub.PlatformEnum.CUDA]
    register()
    register()
    return possible


def config(n: int = 64, k: int = 128, **changes: Any) -> stub.FP8ScaledMMLinearLayerConfig:
    values: dict[str, Any] = {
        "weight_shape": (n, k),
        "input_dtype": torch.float16,
        "group_shape": CHANNEL,
    }
    return stub.FP8ScaledMMLinearLayerConfig(**values | changes)


def loaded(n: int, k: int) -> tuple[nn.Module, torch.Tensor]:
    """A layer as vLLM hands it over, codes transposed and a scale per output channel, and its weight
    [N, K]."""
    draw = torch.Generator().manual_seed(n + k)
    # Multiples of 2**-3 up to 7.5: exact in E4M3.
    values = torch.randint(-7, 8, (n, k), generator=draw) * 2.0 ** torch.randint(
        -3, 1, (n, 1), generator=draw
    )
    scales = 2.0 ** torch.randint(-4, 1, (n, 1), generator=draw)
    layer = nn.Module()
    layer.weight = nn.Parameter(values.to(torch.float8_e4m3fn).t(), requires_grad=False)
    layer.weight_scale = nn.Parameter(scales, requires_grad=False)
    return layer, values.double() * scales


def test_the_kernel_comes_first_once(kernels: list[Any]) -> None:
    names = [each.__name__ for each in kernels]
    assert names == ["FloatWeightKernel", "RefusingFloatKernel", "OtherFloatKernel"]
    assert kernels[0].is_supported(80) == (True, None)
    assert kernels[0].is_supported(75)[0] is False


def test_fp8_activations_are_refused(kernels: list[Any]) -> None:
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS="):
        kernels[0](config(), NAMES).apply_scaled_mm(A=None, B=None)


def test_without_an_nvidia_gpu_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = stub.install(monkeypatch, cuda=False)._POSSIBLE_WFP8A16_KERNELS[stub.PlatformEnum.CUDA]
    register()
    assert kernels[0].is_supported()[0] is False


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"group_shape": TENSOR, "input_dtype": torch.bfloat16}, None),
        ({"group_shape": (128, 128)}, "blocks of (128, 128)"),
        ({"input_dtype": torch.float32}, "float32"),
        ({"n": 60}, "multiple of 8"),
    ],
)
def test_the_kernel_takes_one_scale_a_channel(
    kernels: list[Any], changes: dict[str, Any], reason: str | None
) -> None:
    takes, why = kernels[0].can_implement(config(**changes))
    assert takes is (reason is None)
    assert (why is None) if reason is None else (reason in why)


def test_a_refusal_is_one_line_however_many_layers(
    kernels: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        blocks = {kernels[0].can_implement(config(group_shape=(128, 128))) for _ in range(3)}
        # As from a version of vLLM whose layers have other names for their attributes.
        foreign = {kernels[0].can_implement(object()) for _ in range(3)}
    told = zip((blocks, foreign), (logging.INFO, logging.WARNING), caplog.records, strict=True)
    for answers, level, record in told:
        ((taken, why),) = answers
        assert taken is False
        assert (record.levelno, record.getMessage()) == (
            level,
            f"marlinq: {why}; vLLM's kernels run such layers",
        )


@pytest.mark.parametrize(("n", "k"), [(64, 128), (72, 160)])
def test_products_are_those_of_the_weight(kernels: list[Any], n: int, k: int) -> None:
    layer, weight = loaded(n, k)
    made = kernels[0](config(n, k), NAMES)
    made.process_weights_after_loading(layer)
    x = torch.randint(-2, 3, (3, 5, k)).to(torch.float16)
    bias = torch.randint(-8, 9, (n,)).to(torch.float16)
    out = made.apply_weights(layer, x, bias)
    assert out.is_contiguous()
    # Sums of at most 160 products of small multiples of powers of two are exact in float32.
    expected = (x.double() @ weight.t() + bias).to(torch.float16)
    torch.testing.assert_close(out, expected, rtol=2.0**-10, atol=0)


def no_compiler(kernel: Any, layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(operand: object, dtype: torch.dtype) -> None:
        raise EnvironmentProblem("no NVRTC")

    monkeypatch.setattr(sys.modules[kernel.__module__], "prepare", fails)


def large_scale(kernel: Any, layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    layer.weight_scale.data.fill_(1e6)


@pytest.mark.parametrize("breaks", [no_compiler, large_scale])
def test_a_layer_that_fails_is_vllms_own(
    kernels: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[..., None],
) -> None:
    layer, _ = loaded(64, 128)
    made = kernels[0](config(), NAMES)
    breaks(kernels[0], layer, monkeypatch)
    with caplog.at_level(logging.WARNING):
        made.process_weights_after_loading(layer)
    assert made._own.parameters == ["weight", "weight_scale"]
    assert bool((made.apply_weights(layer, torch.zeros(3, 128)) == 7).all())
    (record,) = caplog.records
    assert "OtherFloatKernel runs" in record.getMessage()


def test_without_the_list_of_fp8_kernels_nothing_is_taken_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = stub.install(monkeypatch)
    del module._POSSIBLE_WFP8A16_KERNELS
    register()
    (record,) = caplog.records
    assert "expected _POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CUDA]" in record.getMessage()
    assert module._POSSIBLE_KERNELS[stub.PlatformEnum.CUDA] == [stub.OtherKernel]
