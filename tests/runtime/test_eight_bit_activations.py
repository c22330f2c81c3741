"""FP8 checkpoints with quantised activations: what loading keeps of them, and what a large batch calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError, UsageError
from marlinq.core.schemes import SCHEMES
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import LAYOUTS, ModuleSpec, StoredWeight
from marlinq.kernels.choose.eight_bit_decision import BESIDE_INT4, decide_eight_bits
from marlinq.kernels.contract.device import H200
from marlinq.kernels.ops.fp8_a8 import fp8_a8_gemm
from marlinq.runtime import OPERATORS, Setting, load
from marlinq.runtime import quant_linear as runtime_linear
from marlinq.runtime.quant_linear import QuantLinear
from marlinq.runtime.step.join import join_operands
from tests.kernels.problems import relative_error
from tests.testing.runnable_folders import random_quantizer, save_quantized
from tests.testing.schemes import scheme
from tests.testing.tiny_models import tiny_model

K, N = 256, 128
ROUNDING = Setting(torch.device("cpu"), torch.bfloat16, exact=False)
EXACT = Setting(torch.device("cpu"), torch.bfloat16)


def stored(name: str, input_scale: float = 0.02) -> StoredWeight:
    """A random weight of a named scheme, as compressed-tensors stores it."""
    torch.manual_seed(0)
    wanted = SCHEMES[name].example(scheme())
    codes = (
        torch.randint(0, 0x7E, (K, N), dtype=torch.uint8) | torch.randint(0, 2, (K, N)).to(torch.uint8) << 7
    )
    shape = wanted.granularity.scales_shape(K, N)
    static = wanted.activations is not None and not wanted.activations.dynamic
    weight = QuantizedWeight.from_codes(
        wanted,
        codes,
        scales=(torch.rand(shape) + 0.5).half(),
        input_scale=torch.tensor(input_scale) if static else None,
    )
    layout = LAYOUTS["float-quantized"]
    return StoredWeight("a.linear", layout, ModuleSpec(K, N, wanted), layout.pack(weight))


def built(weight: StoredWeight, setting: Setting) -> QuantLinear:
    module = OPERATORS["w8a16"].build(weight, None, setting)
    assert isinstance(module, QuantLinear)
    return module


@pytest.mark.parametrize("name", ["fp8", "fp8-dynamic", "fp8-static", "fp8-block"])
def test_large_batches_round_activations_as_the_checkpoint_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = stored(name)
    module = built(weight, ROUNDING)
    wanted = weight.scheme.activations
    assert module.operand.activations == wanted
    assert (module.operand.input_scale is not None) == (name == "fp8-static")
    assert built(weight, EXACT).operand.activations is None
    calls = []

    def counted(x: Tensor, *others: object) -> Tensor:
        calls.append(len(x))
        return fp8_a8_gemm(x, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(runtime_linear, "fp8_a8_gemm", counted)
    # A CPU never decides for it by itself.
    assert not module.rounds
    module._least_rows = None if wanted is None else 4
    x = torch.randn(5, K).bfloat16()
    dense = weight.weight().dequantize(torch.float64)
    few, many = module(x[:3]), module(x)
    assert relative_error(few, x[:3].double() @ dense.t()) < 2.0**-8
    error = relative_error(many, x.double() @ dense.t())
    if wanted is None:
        assert not calls
        assert error < 2.0**-8
    else:
        assert calls == [5]
        assert 2.0**-7 < error < 2.0**-4
    module.half()
    module(x.half())
    assert len(calls) <= 1


def test_joined_products_keep_activations_and_hold_the_largest_input() -> None:
    first, second = (built(stored("fp8-static", scale), ROUNDING).operand for scale in (2.0**-6, 2.0**-5))
    joined = join_operands([first, second], interleave=False)
    assert joined.activations == first.activations
    assert joined.input_scale == 2.0**-5
    mixed = join_operands([first, built(stored("fp8"), ROUNDING).operand], interleave=False)
    assert (mixed.activations, mixed.input_scale) == (None, None)


@pytest.mark.parametrize(("asymmetric", "allowed"), [(False, True), (True, False)])
def test_int4_weights_round_activations_where_the_setting_asks(asymmetric: bool, allowed: bool) -> None:
    weight = int4_weight(asymmetric)
    asked = replace(EXACT, fp8_activations=True)
    module = OPERATORS["w4a16"].build(weight, None, asked)
    assert isinstance(module, QuantLinear)
    assert module.operand.activations == BESIDE_INT4
    plain = OPERATORS["w4a16"].build(weight, None, EXACT)
    assert isinstance(plain, QuantLinear)
    assert plain.operand.activations is None
    # A CPU never rounds by itself.
    assert not module.rounds
    assert not module.rounding_instantiations()
    assert (decide_eight_bits(module.operand.problem(1), BESIDE_INT4, H200).least_rows is not None) == allowed
    if not allowed:
        return
    module._least_rows = 4
    x = torch.randn(5, K).bfloat16()
    few, many = module(x[:3]), module(x)
    dense = weight.weight().dequantize(torch.float64)
    assert relative_error(few, x[:3].double() @ dense.t()) < 2.0**-8
    assert 2.0**-7 < relative_error(many, x.double() @ dense.t()) < 2.0**-4


def int4_weight(asymmetric: bool) -> StoredWeight:
    """A random weight of groups of 128, as compressed-tensors stores it."""
    wanted = scheme(128, symmetric=not asymmetric)
    shape = wanted.granularity.scales_shape(K, N)
    weight = QuantizedWeight.from_codes(
        wanted,
        torch.randint(0, 16, (K, N), dtype=torch.uint8),
        scales=(torch.rand(shape) + 0.5).half(),
        zeros=torch.randint(0, 16, shape).to(torch.uint8) if asymmetric else None,
    )
    layout = LAYOUTS["compressed-tensors"]
    return StoredWeight("a.linear", layout, ModuleSpec(K, N, wanted), layout.pack(weight))


def test_a_model_that_no_product_rounds_for_is_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer(symmetric=True))
    for operator in ("auto", "w4a16"):
        with pytest.raises(UnsupportedError, match="activations fp8: no product can round them; model"):
            load(tmp_path, device="cpu", activations="fp8", operator=operator)
    with pytest.raises(UsageError, match="activations 'int8': expected fp8"):
        load(tmp_path, device="cpu", activations="int8")
