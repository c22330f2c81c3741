"""A CPU's head of float16 weights: when it is exact, when it is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from marlinq.operations.bench.decode import weight_bytes
from marlinq.runtime import Setting, cpu_head, generate, load
from marlinq.runtime.cpu_head import HalfWeightLinear, pack_head
from tests.runtime.test_loading import logits
from tests.testing.runnable_folders import save_plain
from tests.testing.tiny_models import tiny_model

CPU = torch.device("cpu")
FLOAT32 = Setting(CPU, torch.float32, exact=False)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head is large enough, and packed ones are faster."""
    monkeypatch.setattr(cpu_head, "_LEAST_VALUES", 1)
    monkeypatch.setattr(cpu_head, "seconds_in_turn", lambda *candidates: (2e-6, 8e-6))


def rounded_model(dtype: torch.dtype = torch.float16) -> PreTrainedModel:
    return tiny_model("llama").to(dtype).float()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 65])
def test_the_product_against_float64(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(576, 1000, bias=bias).half().float()
    x = torch.randn(1, rows, 576)
    expected = x.double() @ linear.weight.double().t()
    terms = x.double().abs() @ linear.weight.double().abs().t()
    if bias:
        expected, terms = expected + linear.bias.double(), terms + linear.bias.double().abs()
    found = HalfWeightLinear(linear)(x)
    assert (found.shape, found.dtype) == ((1, rows, 1000), torch.float32)
    # A float32 sum of K terms and a bias: K + 1 roundings.
    assert bool(((found.double() - expected).abs() <= 577 * 2**-24 * terms).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_that_float16_holds_is_packed(dtype: torch.dtype, fast: None) -> None:
    model, reference = rounded_model(dtype), rounded_model(dtype)
    (note,) = pack_head(model, FLOAT32)
    how = "float16 weights under float32 activations, which loses nothing"
    assert note == f"head of 64 x 128: {how}: 2 us measured, 8 us in float32"
    assert isinstance(model.get_output_embeddings(), HalfWeightLinear)
    assert weight_bytes(model, 1) == weight_bytes(reference, 1) - 2 * 64 * 128
    # 64 terms of float32 in another order.
    expected = logits(reference)
    torch.testing.assert_close(
        logits(model), expected, rtol=0, atol=64 * 2**-24 * float(expected.abs().max())
    )


@pytest.mark.parametrize(
    ("value", "held"), [(2.0**-25, True), (1.0 + 2.0**-12, False), (70000.0, False), (float("nan"), False)]
)
def test_a_value_that_float16_does_not_hold_keeps_float32(value: float, held: bool, fast: None) -> None:
    model = rounded_model()
    with torch.no_grad():
        model.lm_head.weight[5, 7] = value
        model.lm_head.weight[0, 0] = 1.0
    (note,) = pack_head(model, FLOAT32)
    assert isinstance(model.lm_head, HalfWeightLinear) == held
    assert ("float16 does not hold its weights" in note) == (not held)


def test_a_slower_product_is_not_taken(fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_head, "seconds_in_turn", lambda *candidates: (7e-6, 8e-6))
    model = rounded_model()
    (note,) = pack_head(model, FLOAT32)
    why = "packed in float16 it is not 1.2 times faster"
    assert note == f"head of 64 x 128: float32; {why}: 7 us measured, 8 us in float32"
    assert type(model.lm_head) is nn.Linear


def test_a_torch_without_the_product_is_named(fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_head, "_OPERATIONS", ("no_such_product",))
    (note,) = pack_head(rounded_model(), FLOAT32)
    assert f"torch {torch.__version__} has no product of float16 weights" in note


@pytest.mark.parametrize(
    "setting", [Setting(torch.device("cuda:0"), torch.float32), Setting(CPU, torch.bfloat16)]
)
def test_heads_on_gpus_and_in_bfloat16_are_left_alone(setting: Setting, fast: None) -> None:
    assert pack_head(rounded_model(), setting) == []


def test_small_heads_are_left_alone() -> None:
    assert pack_head(rounded_model(), FLOAT32) == []


def test_loading_packs_tied_heads_too(tmp_path: Path, fast: None) -> None:
    folder = save_plain(tmp_path, tiny_model("gpt2").half())
    loaded = load(folder, device="cpu")
    assert isinstance(loaded.model.lm_head, HalfWeightLinear)
    assert any(note.startswith("head of ") for note in loaded.report())
    exact = load(folder, device="cpu", exact=True)
    assert type(exact.model.lm_head) is nn.Linear
    tokens = [generate(found, [1, 9, 30], max_new_tokens=6).tokens for found in (loaded, exact)]
    assert tokens[0] == tokens[1]
