"""A mixture's experts in vLLM, against a stub of what the plugin uses."""

from __future__ import annotations

import itertools
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from marlinq.core.errors import EnvironmentProblem
from marlinq.core.scheme import INT4, INT8, Element
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.formats import LAYOUTS
from marlinq.formats.packing import pack_columns, pack_rows
from marlinq.integrations.vllm import VARIABLE, register
from tests.integrations.vllm import stub
from tests.testing.schemes import quantized

EXPERTS, TOP, HIDDEN, INNER, ROWS = 4, 2, 128, 64, 5
METHODS = {
    "gptq": stub.AutoGPTQMoEMethod,
    "awq": stub.AutoAWQMoEMethod,
    "compressed-tensors": stub.CompressedTensorsWNA16MarlinMoEMethod,
    "compressed-tensors, as stored": stub.CompressedTensorsWNA16MoEMethod,
}


@pytest.fixture
def config_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class that the plugin has registered."""
    stub.install(monkeypatch)
    register()
    return sys.modules["vllm.model_executor.layers.quantization"].registered["marlinq"]


@pytest.mark.parametrize(
    ("quantization", "model", "user", "taken"),
    [
        ({"quant_method": "gptq", "bits": 4}, {"num_experts": 8}, None, True),
        ({"quant_method": "awq", "w_bit": 4}, {"num_local_experts": 8}, None, True),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4}}},
            },
            {"text_config": SimpleNamespace(n_routed_experts=64)},
            None,
            True,
        ),
        ({"quant_method": "gptq", "bits": 8}, {"num_experts": 8}, None, True),
        ({"quant_method": "gptq", "bits": 3}, {"num_experts": 8}, None, False),
        ({"quant_method": "gptq", "bits": [4]}, {"num_experts": 8}, None, False),
        ({"quant_method": "gptq", "bits": 4}, {"num_experts": 8}, "gptq_marlin", False),
        ({"quant_method": "gptq", "bits": 4}, {"num_experts": 1}, None, False),
        ({"quant_method": "gptq", "bits": 4}, {}, None, False),
        ({"quant_method": "fp8", "bits": 4}, {"num_experts": 8}, None, False),
        *(
            (
                {"quant_method": "compressed-tensors", "config_groups": {"g": group}},
                {"num_experts": 8},
                None,
                False,
            )
            for group in (
                {"weights": None},
                {"weights": {"num_bits": 8, "type": "float"}},
                {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}},
                {"weights": {"num_bits": [4]}},
                {"weights": [4]},
                None,
            )
        ),
    ],
)
def test_only_mixtures_of_integers_are_taken(
    config_class: Any, quantization: dict[str, Any], model: dict[str, Any], user: str | None, taken: bool
) -> None:
    found = config_class.override_quantization_method(quantization, user, hf_config=SimpleNamespace(**model))
    assert found == ("marlinq" if taken else None)


def test_without_an_nvidia_gpu_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    stub.install(monkeypatch, cuda=False)
    register()
    found = sys.modules["vllm.model_executor.layers.quantization"].registered["marlinq"]
    mixture = SimpleNamespace(num_experts=8)
    assert found.override_quantization_method({"quant_method": "gptq", "bits": 4}, None, mixture) is None


@pytest.mark.parametrize(("mode", "linear", "experts"), [("linear", 1, 0), ("experts", 0, 1), ("all", 1, 1)])
def test_each_mode_registers_its_own_kernels(
    monkeypatch: pytest.MonkeyPatch, mode: str, linear: int, experts: int
) -> None:
    kernels = stub.install(monkeypatch)._POSSIBLE_KERNELS[stub.PlatformEnum.CUDA]
    monkeypatch.setenv(VARIABLE, mode)
    register()
    registered = sys.modules["vllm.model_executor.layers.quantization"].registered
    assert (len(kernels) - 1, len(registered)) == (linear, experts)


def test_a_version_without_registration_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stub.install(monkeypatch)
    del sys.modules["vllm.model_executor.layers.quantization"].register_quantization_config
    monkeypatch.setenv(VARIABLE, "experts")
    register()
    (record,) = caplog.records
    assert "register_quantization_config" in record.getMessage()
    assert "vLLM's kernels run" in record.getMessage()


def layer_and_method(
    config_class: Any, form: str = "gptq", moe: dict[str, Any] | None = None, **config: Any
) -> tuple[stub.RoutedExperts, Any]:
    """A layer without parameters, and the method that it gets."""
    values = {"hidden_dim": HIDDEN, "intermediate_size_per_partition": INNER, "num_local_experts": EXPERTS}
    layer = stub.RoutedExperts(stub.MoeConfig(**values | {"experts_per_token": TOP} | (moe or {})))
    for name, value in config.pop("layer", {}).items():
        setattr(layer, name, value)
    built = config_class.from_config({"quant_method": "gptq", "method": METHODS[form], **config})
    assert type(built).__name__ == "BuiltConfig"
    assert built.get_quant_method(nn.Linear(1, 1), "model.layers.0.mlp.gate") is stub.OtherKernel
    method = built.get_quant_method(layer, layer.layer_name)
    # vLLM compares the names of classes.
    assert type(method).__name__ == METHODS[form].__name__
    return layer, method


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 3}, "weights of 3 bits"),
        ({"desc_act": True}, "activation order"),
        ({"moe": {"in_dtype": torch.float32}}, "float32"),
        ({"layer": {"activation": "relu2"}}, "relu2"),
        ({"layer": {"swiglu_limit": 7.0}}, "activation silu"),
        ({"moe": {"has_bias": True}}, "biases"),
        ({"moe": {"is_lora_enabled": True}}, "LoRA"),
        ({"layer": {"apply_router_weight_on_input": True}}, "router weights"),
        ({"moe": {"moe_parallel_config": stub.Parallel(dp_size=2)}}, "data parallel"),
        ({"moe": {"moe_parallel_config": stub.Parallel(enable_eplb=True)}}, "load balancing"),
        ({"moe": {"intermediate_size_per_partition": 96}}, "multiple of 64"),
        ({"group_size": 128}, "group size 128"),
        ({"moe": {"num_local_experts": 1024}}, "1024 experts"),
    ],
)
def test_refused_experts_run_vllms_own_method(
    config_class: Any, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    with caplog.at_level(logging.INFO):
        layer, method = layer_and_method(config_class, **changes)
    assert type(method) is stub.AutoGPTQMoEMethod
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert layer.layer_name in record.getMessage()


def strange_config(found: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A model's config that can't be asked for its number of experts."""

    class Strange:
        @property
        def num_experts(self) -> int:
            raise RuntimeError("strange")

    asked = found.override_quantization_method({"quant_method": "gptq", "bits": 4}, None, Strange())
    return asked is None


def final_class(found: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A version whose configs' classes have no subclasses."""

    class Final(stub.BuiltConfig):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    monkeypatch.setattr(sys.modules[found.__module__], "quantization_config_class", lambda name: Final)
    built = found.from_config({"quant_method": "gptq", "method": METHODS["gptq"]})
    return type(built) is Final


@pytest.mark.parametrize("breaks", [strange_config, final_class])
def test_a_hook_that_fails_leaves_experts_to_vllm(
    config_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaks: Any
) -> None:
    assert breaks(config_class, monkeypatch)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith("vLLM's kernels run experts")


def weight(
    k: int, n: int, group_size: int, *, zeros: bool, seed: int, element: Element = INT4
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    size = k if group_size == -1 else group_size
    points = torch.randint(0, element.codes, (k // size, n), generator=generator, dtype=torch.uint8)
    step = 0.32 / element.codes
    return quantized(
        codes=torch.randint(0, element.codes, (k, n), generator=generator, dtype=torch.uint8),
        scales=step * (0.5 + torch.rand(k // size, n, generator=generator)).to(torch.float16),
        zeros=points if zeros else torch.full_like(points, element.midpoint),
        g_idx=trivial_g_idx(k, size),
        size=size,
        element=element,
    )


def load(layer: nn.Module, form: str, product: str, experts: list[QuantizedWeight], *, zeros: bool) -> None:
    """Parameters as vLLM's method for ``form`` has made and filled them."""
    put: dict[str, Tensor] = {}
    scales = torch.stack([q.scales for q in experts])
    bits = experts[0].element.bits
    if form == "awq":
        packed = [LAYOUTS["awq"].pack(q) for q in experts]
        put = {
            key: torch.stack([tensors[key] for tensors in packed]) for key in ("qweight", "qzeros", "scales")
        }
    elif form == "gptq":
        put = {"qweight": torch.stack([pack_rows(q.codes, bits) for q in experts]), "scales": scales}
        # vLLM never reads its zero points here.
        put["qzeros"] = torch.zeros_like(scales)[..., ::8]
    else:
        put = {
            "weight_packed": torch.stack([pack_rows(q.codes, bits) for q in experts]),
            "weight_scale": scales,
        }
        if zeros:
            put["weight_zero_point"] = torch.stack([pack_columns(q.zeros, bits) for q in experts])
        if "as stored" in form:
            put = {key: value.mT.contiguous() for key, value in put.items()}
        put["weight_shape"] = torch.zeros(len(experts), 2)
    for key, value in put.items():
        parameter = nn.Parameter(value, requires_grad=False)
        if not key.endswith("shape"):
            parameter.is_transposed = "as stored" not in form  # type: ignore[attr-defined]
        layer.register_parameter(f"{product}_{key}", parameter)


def merged(gate: QuantizedWeight, up: QuantizedWeight) -> QuantizedWeight:
    """Gate's and up's columns side by side, as vLLM keeps them."""
    sides = {
        key: torch.cat((getattr(gate, key), getattr(up, key)), 1) for key in ("codes", "scales", "zeros")
    }
    return quantized(
        **sides,
        g_idx=gate.g_idx,
        size=gate.scheme.channels_per_group(gate.in_features),
        element=gate.element,
    )


def filled(
    config_class: Any, form: str, group_size: int, *, zeros: bool, element: Element = INT4
) -> tuple[stub.RoutedExperts, Any, list[tuple[QuantizedWeight, ...]]]:
    layer, method = layer_and_method(config_class, form, group_size=group_size, bits=element.bits)
    experts = [
        tuple(
            weight(k, n, group_size, zeros=zeros, seed=10 * e + i, element=element)
            for i, (k, n) in enumerate([(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)])
        )
        for e in range(EXPERTS)
    ]
    load(layer, form, "w13", [merged(gate, up) for gate, up, _ in experts], zeros=zeros)
    load(layer, form, "w2", [down for *_, down in experts], zeros=zeros)
    return layer, method, experts


@pytest.mark.parametrize(
    ("form", "group_size", "zeros", "element"),
    [
        ("gptq", 32, False, INT4),
        ("gptq", -1, False, INT4),
        ("awq", 32, True, INT4),
        ("awq", 64, False, INT4),
        ("compressed-tensors", 64, False, INT4),
        ("compressed-tensors", 32, True, INT4),
        ("compressed-tensors", -1, False, INT4),
        ("compressed-tensors, as stored", 32, True, INT4),
        ("compressed-tensors, as stored", -1, False, INT4),
        ("gptq", 32, False, INT8),
        ("compressed-tensors", -1, False, INT8),
        ("compressed-tensors, as stored", 64, True, INT8),
    ],
)
def test_the_layer_is_that_of_the_weights(
    config_class: Any, form: str, group_size: int, zeros: bool, element: Element
) -> None:
    layer, method, experts = filled(config_class, form, group_size, zeros=zeros, element=element)
    method.process_weights_after_loading(layer)
    assert not method.ran
    assert method.get_fused_moe_quant_config(layer) is None
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, HIDDEN, generator=generator).to(torch.float16)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(ROWS)]).to(
        torch.int32
    )
    routing = torch.rand(ROWS, TOP, generator=generator)
    out = method.apply(layer, x, routing, ids, shared_experts=None, shared_experts_input=None)
    wanted = torch.zeros(ROWS, HIDDEN, dtype=torch.float64)
    for row in range(ROWS):
        for expert, share in zip(ids[row].tolist(), routing[row].double(), strict=True):
            gate, up, down = (q.dequantize(torch.float64).t() for q in experts[expert])
            inner = nn.functional.silu(x[row].double() @ gate) * (x[row].double() @ up)
            wanted[row] += share * (inner @ down)
    # One rounding of the activations between the products and one of the sum, each half a unit of float16.
    magnitude = wanted.abs().max()
    assert (out.double() - wanted).abs().max() <= 4 * 2.0**-11 * magnitude


def test_experts_of_other_ranks_add_nothing(config_class: Any) -> None:
    layer, method, _ = filled(config_class, "gptq", 32, zeros=False)
    method.process_weights_after_loading(layer)
    x, routing = torch.ones(1, HIDDEN, dtype=torch.float16), torch.ones(1, TOP)
    here = method.apply(layer, x, routing, torch.tensor([[0, 0]], dtype=torch.int32))
    # The router counts eight; the four here are its last.
    layer.expert_map = torch.tensor([-1] * EXPERTS + list(range(EXPERTS)), dtype=torch.int32)
    there = method.apply(layer, x, routing, torch.tensor([[EXPERTS, EXPERTS]], dtype=torch.int32))
    nowhere = method.apply(layer, x, routing, torch.tensor([[0, 1]], dtype=torch.int32))
    assert torch.equal(here, there)
    assert not nowhere.any()


def test_vllms_parameters_are_gone(config_class: Any) -> None:
    layer, method, _ = filled(config_class, "awq", 32, zeros=True)
    method.process_weights_after_loading(layer)
    assert sorted(name for name, _ in layer.named_parameters()) == [
        f"marlinq_{product}_{kind}"
        for product in ("down", "gate_up")
        for kind in ("scales", "words", "zeros")
    ]


def overflowing_scale(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = layer.w2_scales
    assert isinstance(scales, nn.Parameter)
    layer.w2_scales = nn.Parameter(scales.float().fill_(1e6), requires_grad=False)


def unknown_shape(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    layer.w2_qweight = nn.Parameter(torch.zeros(EXPERTS, 3, 5, dtype=torch.int32), requires_grad=False)


def flat_words(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    layer.w2_qweight = nn.Parameter(torch.zeros(15, dtype=torch.int32), requires_grad=False)


def no_parameter(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    del layer.w13_qweight


def no_compiler(layer: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise EnvironmentProblem("no NVRTC")

    monkeypatch.setattr(sys.modules["marlinq.integrations.vllm.experts"], "prepare", fails)


@pytest.mark.parametrize("breaks", [overflowing_scale, unknown_shape, flat_words, no_parameter, no_compiler])
def test_experts_that_can_not_be_loaded_stay_vllms(
    config_class: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, breaks: Any
) -> None:
    layer, method, _ = filled(config_class, "gptq", 32, zeros=False)
    breaks(layer, monkeypatch)
    method.process_weights_after_loading(layer)
    assert method.ran
    (record,) = caplog.records
    assert "vLLM's kernels run" in record.getMessage()
    x = torch.zeros(1, HIDDEN, dtype=torch.float16)
    assert bool((method.apply(layer, x, torch.ones(1, TOP), torch.zeros(1, TOP)) == 7).all())
    assert method.get_fused_moe_quant_config(layer) == "vLLM's"


def test_batches_hold_every_captured_size(config_class: Any) -> None:
    from marlinq.integrations.vllm.experts import batches

    found = batches(8192, [1, 2, 200, 512])
    assert found == sorted(set(found))
    assert {*range(1, 65), 200, 512, 8192} <= set(found)
    assert batches(48, [64, 512]) == list(range(1, 49))
    # Neighbours beyond 64 differ by a sixteenth at most.
    assert all(later <= earlier * 17 / 16 for earlier, later in itertools.pairwise(found[63:]))
