"""The vLLM plugin, against a stub of what it uses."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.kept import kept_path
from marlinq.core.scheme import INT4, INT8, Element
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.formats.packing import pack_rows
from marlinq.integrations.vllm import VARIABLE, register
from marlinq.runtime import marlin_operand
from tests.integrations.vllm import stub
from tests.testing.schemes import quantized

ROOT = Path(__file__).parents[3]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that the stub's vLLM asks on CUDA, in order."""
    return stub.install(monkeypatch)._POSSIBLE_KERNELS[stub.PlatformEnum.CUDA]


@pytest.fixture
def kernel(kernels: list[Any]) -> Any:
    """The class that the plugin has put first."""
    register()
    return kernels[0]


def config(k: int = 128, n: int = 64, **changes: Any) -> stub.MPLinearLayerConfig:
    values: dict[str, Any] = {
        "full_weight_shape": (k, n),
        "partition_weight_shape": (k, n),
        "weight_type": "uint4" if changes.get("zero_points") else "uint4b8",
        "act_type": torch.float16,
        "group_size": 32,
        "zero_points": False,
    }
    return stub.MPLinearLayerConfig(**values | changes)


def test_the_entry_point_is_the_function() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = project["entry-points"]["vllm.general_plugins"]["marlinq"]
    module, _, attribute = named.partition(":")
    assert getattr(import_module(module), attribute) is register
    assert "vllm" in project["optional-dependencies"]


def test_the_kernel_comes_first_once(kernels: list[Any]) -> None:
    register()
    register()
    assert [each.__name__ for each in kernels] == ["IntegerLinearKernel", "OtherKernel"]
    # vLLM 0.33 sorts by these words.
    assert not [word for word in ("marlin", "humming") if word in kernels[0].__name__.lower()]


@pytest.mark.parametrize(("mode", "word"), [("off", "off by"), ("fast", "expected one of")])
def test_modes_that_leave_vllm_alone(
    kernels: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    word: str,
) -> None:
    monkeypatch.setenv(VARIABLE, mode)
    with caplog.at_level(logging.INFO):
        register()
    assert kernels == [stub.OtherKernel]
    assert [record.getMessage().count(word) for record in caplog.records] == [1]


def no_list(module: Any) -> None:
    del module._POSSIBLE_KERNELS


def no_cuda(module: Any) -> None:
    del module._POSSIBLE_KERNELS[stub.PlatformEnum.CUDA]


def no_platforms(module: Any) -> None:
    del module.PlatformEnum


@pytest.mark.parametrize("breaks", [no_list, no_cuda, no_platforms])
def test_another_version_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaks: Callable[[Any], None]
) -> None:
    breaks(stub.install(monkeypatch))
    register()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "vLLM 0.26.0: expected _POSSIBLE_KERNELS[PlatformEnum.CUDA]" in record.getMessage()
    assert "vLLM's kernels run" in record.getMessage()


def compile_factors() -> dict[str, object]:
    """Text that vLLM hashes into the key of compiled graphs: the value of every variable that it knows."""
    return {name: value() for name, value in sys.modules["vllm.envs"].environment_variables.items()}


def test_graphs_compiled_without_the_plugin_are_not_run_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for mode in ("off", "linear", "experts", "all"):
        stub.install(monkeypatch)
        monkeypatch.setenv(VARIABLE, mode)
        without = compile_factors()
        register()
        found.append(compile_factors())
        assert (found[-1] == without) is (mode == "off")
        register()
        assert compile_factors() == found[-1]
    assert len({repr(factors) for factors in found}) == len(found)


def test_a_missing_package_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    stub.install(monkeypatch)
    register()
    present = compile_factors()
    monkeypatch.setattr(
        sys.modules["marlinq.integrations.vllm.interface"], "missing_package", lambda: "no CuPy"
    )
    assert compile_factors() != present


def test_without_a_key_nothing_is_taken_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = stub.install(monkeypatch)._POSSIBLE_KERNELS[stub.PlatformEnum.CUDA]
    del sys.modules["vllm.envs"].environment_variables
    register()
    (record,) = caplog.records
    assert "expected environment_variables" in record.getMessage()
    assert kernels == [stub.OtherKernel]
    assert not sys.modules["vllm.model_executor.layers.quantization"].registered


@pytest.mark.parametrize("raised", [ValueError("known already"), KeyError("gptq"), RuntimeError("no driver")])
def test_experts_that_can_not_be_registered_leave_linear_layers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raised: Exception
) -> None:
    def fails(name: str) -> None:
        raise raised

    kernels = stub.install(monkeypatch)._POSSIBLE_KERNELS[stub.PlatformEnum.CUDA]
    sys.modules["vllm.model_executor.layers.quantization"].register_quantization_config = fails  # type: ignore[attr-defined]
    register()
    (record,) = caplog.records
    assert f"{type(raised).__name__}: " in record.getMessage()
    assert record.getMessage().endswith("vLLM's kernels run experts")
    assert [each.__name__ for each in kernels] == ["IntegerLinearKernel", "OtherKernel"]


def test_a_missing_name_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub.install(monkeypatch)
    del sys.modules["vllm.model_executor.parameter"].permute_param_layout_
    register()
    (record,) = caplog.records
    assert record.getMessage().startswith("marlinq: vLLM 0.26.0, where 0.26 to 0.33 is known: ImportError: ")
    assert "permute_param_layout_" in record.getMessage()
    assert record.getMessage().endswith("; vLLM's kernels run linear layers and experts")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"act_type": torch.bfloat16, "zero_points": True}, None),
        ({"group_size": -1}, None),
        ({"group_size": 96, "full_weight_shape": (192, 64), "partition_weight_shape": (192, 64)}, None),
        ({"act_type": torch.float32}, "float32"),
        ({"weight_type": "uint8b128"}, None),
        ({"weight_type": "uint8", "zero_points": True}, None),
        ({"weight_type": "uint8"}, "uint8 without zero points"),
        ({"weight_type": "uint8b128", "zero_points": True}, "uint8b128 with zero points"),
        ({"weight_type": "uint2b2"}, "uint2b2"),
        ({"weight_type": "uint4"}, "without zero points"),
        ({"group_size": 16}, "group size 16"),
        ({"group_size": 0}, "group size 0"),
        (
            {"full_weight_shape": (256, 64), "partition_weight_shape": (128, 64), "group_size": 256},
            "group size 256",
        ),
        ({"partition_weight_shape": (128, 60)}, "multiple of 8"),
        ({"full_weight_shape": (256, 64), "has_g_idx": True}, "split over ranks"),
    ],
)
def test_the_kernel_takes_supported_integer_layers(
    kernel: Any, changes: dict[str, Any], reason: str | None
) -> None:
    takes, why = kernel.can_implement(config(**changes))
    assert takes is (reason is None)
    assert (why is None) if reason is None else (reason in why)


@pytest.mark.parametrize(
    ("described", "level", "text"),
    [
        (config(group_size=16), logging.INFO, "group size 16"),
        (SimpleNamespace(group_size=32), logging.WARNING, "partition_weight_shape"),
    ],
    ids=["unsupported", "another version's"],
)
def test_a_refusal_is_one_line_however_many_layers(
    kernel: Any, kernels: list[Any], caplog: pytest.LogCaptureFixture, described: Any, level: int, text: str
) -> None:
    with caplog.at_level(logging.INFO):
        answers = {kernel.can_implement(described) for _ in range(3)}
    ((taken, why),) = answers
    assert taken is False
    assert text in why
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (
        level,
        f"marlinq: {why}; vLLM's kernels run such layers",
    )
    assert sys.modules["vllm.model_executor.kernels.linear"].choose_mp_linear_kernel(described) is kernels[1]


def test_registering_initialises_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def initialised() -> None:
        raise AssertionError("a process that may fork workers")

    stub.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_lazy_init", initialised)
    register()
    assert compile_factors()["MARLINQ_VLLM"]


def test_without_an_nvidia_gpu_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = stub.install(monkeypatch, cuda=False)._POSSIBLE_KERNELS[stub.PlatformEnum.CUDA]
    register()
    assert kernels[0].can_implement(config())[0] is False


def weight(
    k: int, n: int, group_size: int, *, zeros: bool, act_order: bool = False, element: Element = INT4
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(k + n + group_size)
    size = k if group_size == -1 else group_size
    groups = k // size
    g_idx = trivial_g_idx(k, size)
    if act_order:
        g_idx = g_idx[torch.randperm(k, generator=generator)]
    points = torch.randint(0, element.codes, (groups, n), generator=generator, dtype=torch.uint8)
    return quantized(
        codes=torch.randint(0, element.codes, (k, n), generator=generator, dtype=torch.uint8),
        # Powers of two: every product and every sum of so few is exact in float16's range of exponents.
        scales=torch.full((groups, n), 2.0**-6, dtype=torch.float16)
        * 2.0 ** torch.randint(-2, 3, (groups, n), generator=generator).to(torch.float16),
        zeros=points if zeros else torch.full_like(points, element.midpoint),
        g_idx=g_idx,
        size=size,
        element=element,
    )


def as_compressed_tensors(q: QuantizedWeight, *, zeros: bool) -> nn.Module:
    """Parameters as vLLM registers them for compressed-tensors: output channels first."""
    layer = nn.Module()
    words = pack_rows(q.codes, q.element.bits).t().contiguous()
    layer.weight_packed = stub.Parameter(words, input_dim=1, output_dim=0, packed_dim=1)
    layer.weight_scale = stub.Parameter(q.scales.t().contiguous(), input_dim=1, output_dim=0)
    if zeros:
        points = pack_rows(q.zeros.t().contiguous(), q.element.bits)
        layer.weight_zero_point = stub.Parameter(points, input_dim=1, output_dim=0, packed_dim=0)
    layer.weight_g_idx = stub.Parameter(q.g_idx, input_dim=0)
    return layer


def as_gptq(q: QuantizedWeight, *, zeros: bool) -> nn.Module:
    """Parameters as vLLM registers them for GPTQ, and for AWQ once it has put its codes in order."""
    layer = nn.Module()
    layer.weight_packed = stub.Parameter(
        pack_rows(q.codes, q.element.bits), input_dim=0, output_dim=1, packed_dim=0
    )
    layer.weight_scale = stub.Parameter(q.scales, input_dim=0, output_dim=1)
    if zeros:
        points = pack_rows(q.zeros.t().contiguous(), q.element.bits).t().contiguous()
        layer.weight_zero_point = stub.Parameter(points, input_dim=0, output_dim=1, packed_dim=1)
    layer.weight_g_idx = stub.Parameter(q.g_idx, input_dim=0)
    return layer


@pytest.mark.parametrize("order", [as_compressed_tensors, as_gptq])
@pytest.mark.parametrize(
    ("k", "n", "group_size", "zeros", "act_order"),
    [
        (128, 64, 32, False, False),
        (128, 64, 64, True, False),
        (192, 128, 96, True, False),
        (128, 64, -1, False, False),
        (160, 72, 32, True, False),
        (128, 64, 32, True, True),
    ],
)
def test_products_are_those_of_the_weight(
    kernel: Any,
    order: Callable[..., nn.Module],
    k: int,
    n: int,
    group_size: int,
    zeros: bool,
    act_order: bool,
) -> None:
    q = weight(k, n, group_size, zeros=zeros, act_order=act_order)
    layer = order(q, zeros=zeros)
    described = config(k, n, group_size=group_size, zero_points=zeros, has_g_idx=act_order)
    assert kernel.can_implement(described) == (True, None)
    made = kernel(described, "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    made.process_weights_after_loading(layer)
    # Whole numbers up to 2: sums of at most 192 products of 5-bit integers and scales of 2**-8 to 2**-4 are
    # exact in float32, and one rounding to float16 is left.
    x = torch.randint(-2, 3, (3, 5, k)).to(torch.float16)
    bias = torch.randint(-8, 9, (n,)).to(torch.float16)
    out = made.apply_weights(layer, x, bias)
    expected = x.to(torch.float64) @ q.dequantize(torch.float64).t() + bias
    assert out.is_contiguous()
    assert out.shape == (3, 5, n)
    torch.testing.assert_close(out, expected.to(torch.float16), rtol=2.0**-10, atol=0)


@pytest.mark.parametrize("order", [as_compressed_tensors, as_gptq])
@pytest.mark.parametrize(
    ("k", "n", "group_size", "zeros"), [(128, 64, 32, False), (160, 72, -1, False), (160, 72, 32, True)]
)
def test_products_of_8_bits(
    kernel: Any, order: Callable[..., nn.Module], k: int, n: int, group_size: int, zeros: bool
) -> None:
    q = weight(k, n, group_size, zeros=zeros, element=INT8)
    layer = order(q, zeros=zeros)
    made = kernel(
        config(k, n, group_size=group_size, weight_type="uint8" if zeros else "uint8b128", zero_points=zeros),
        *("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
    )
    made.process_weights_after_loading(layer)
    # As above, with integers of 8 bits.
    x = torch.randint(-2, 3, (5, k)).to(torch.float16)
    expected = x.to(torch.float64) @ q.dequantize(torch.float64).t()
    found = made.apply_weights(layer, x)
    torch.testing.assert_close(found, expected.to(torch.float16), rtol=2.0**-10, atol=0)


def test_the_operand_takes_the_parameters_place(kernel: Any) -> None:
    q = weight(128, 64, 32, zeros=True)
    layer = as_gptq(q, zeros=True)
    made = kernel(
        config(zero_points=True), "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"
    )
    made.process_weights_after_loading(layer)
    held: dict[str, Tensor] = dict(layer.named_parameters())
    assert held["weight_packed"].shape == (128 // 16, 2 * 64)
    assert held["weight_scale"].shape == held["weight_zero_point"].shape == (4, 64)
    assert all(type(each) is nn.Parameter for name, each in held.items() if name != "weight_g_idx")


def no_compiler(kernel: Any, layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(operand: object, dtype: torch.dtype) -> None:
        raise EnvironmentProblem("no NVRTC")

    monkeypatch.setattr(sys.modules[kernel.__module__], "prepare", fails)


def broken_compiler(kernel: Any, layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(operand: object, dtype: torch.dtype) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(sys.modules[kernel.__module__], "prepare", fails)


def large_scale(kernel: Any, layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    layer.weight_scale.data = layer.weight_scale.data.float().fill_(1e6)


@pytest.mark.parametrize("breaks", [no_compiler, broken_compiler, large_scale])
@pytest.mark.parametrize("act_order", [False, True])
def test_a_layer_that_fails_is_vllms_own(
    kernel: Any,
    kernels: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    act_order: bool,
    breaks: Callable[..., None],
) -> None:
    layer = as_gptq(weight(128, 64, 32, zeros=True, act_order=act_order), zeros=True)
    before = sorted(name for name, _ in layer.named_parameters())
    names = ["weight_packed", "weight_scale", "weight_zero_point", *["weight_g_idx"] * act_order]
    made = kernel(config(zero_points=True, has_g_idx=act_order), *names)
    breaks(kernel, layer, monkeypatch)
    made.process_weights_after_loading(layer)
    assert made._own.parameters == before
    assert bool((made.apply_weights(layer, torch.zeros(3, 128)) == 7).all())
    (record,) = caplog.records
    assert "OtherKernel runs" in record.getMessage()
    # The next layer is asked about again.
    assert kernels == [kernel, stub.OtherKernel]


def test_every_layer_of_a_shape_that_does_not_compile_is_vllms_own(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise EnvironmentProblem("no NVRTC")

    import marlinq.kernels

    monkeypatch.setattr(marlinq.kernels, "precompile_model", fails)
    prepare = sys.modules[kernel.__module__].prepare
    operand = marlin_operand(weight(128, 64, 32, zeros=False), torch.float16)
    on_gpu = replace(
        operand, words=SimpleNamespace(device=torch.device("cuda", 0), shape=operand.words.shape)
    )
    for _ in range(2):
        with pytest.raises(EnvironmentProblem):
            prepare(on_gpu, torch.float16)


def test_each_shape_of_layer_is_one_line(
    kernel: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    import marlinq.kernels

    def compiled(*_: object, **__: object) -> int:
        # Meanwhile another rank would have to wait for the lock.
        folder = os.open(kept_path(""), os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)
        return 7

    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path))
    monkeypatch.setattr(marlinq.kernels, "precompile_model", compiled)
    monkeypatch.setattr(
        marlinq.kernels, "explain", lambda device, problem: SimpleNamespace(reason="tile 8x64, about 5.1 us")
    )
    prepare = sys.modules[kernel.__module__].prepare
    with caplog.at_level(logging.INFO):
        for n in (64, 128, 64):
            operand = marlin_operand(weight(128, n, 32, zeros=False), torch.float16)
            words = SimpleNamespace(device=torch.device("cuda", 0), shape=operand.words.shape)
            prepare(replace(operand, words=words), torch.float16)
    assert [record.getMessage() for record in caplog.records] == [
        f"marlinq: layers of 128 x {n}, groups of 32: tile 8x64, about 5.1 us; 7 kernels compiled"
        for n in (64, 128)
    ]
