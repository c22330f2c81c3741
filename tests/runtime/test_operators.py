"""Operators are found by registration alone: one made here goes through loading, generation and verify."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, ReadAhead
from marlinq.core.granularity import Granularity
from marlinq.core.progress import ReportProgress
from marlinq.core.scheme import Element
from marlinq.formats import StoredWeight
from marlinq.formats.layouts.gptq import GPTQ
from marlinq.kernels import LayerShape
from marlinq.kernels.contract.weight_formats import INT4
from marlinq.operations.bench import bench_decode
from marlinq.operations.verify import kernel_check
from marlinq.runtime import (
    OPERATORS,
    Estimate,
    Operator,
    QuantLinear,
    Setting,
    decide,
    generate,
    load,
    register_operator,
)
from marlinq.runtime.operators import packed
from tests.runtime.test_loading import FLOAT32, logits, relative
from tests.testing.layouts import INTEGERS
from tests.testing.runnable_folders import random_quantizer, random_tuple, save_quantized, stored_weight
from tests.testing.tiny_models import tiny_model

CPU = Setting(torch.device("cpu"), torch.float32)
PROMPT = [1, 9, 30, 77]


class CodesLinear(nn.Module):
    """A product with 8-bit codes, scaled afterwards: y = sum over groups of ((codes - zeros) x) * scales."""

    def __init__(self, stored: StoredWeight, bias: Tensor | None, setting: Setting, factor: float) -> None:
        super().__init__()
        weight = stored.weight()
        self.codes, self.bias, self.factor = weight.codes, bias, factor
        self.zeros, self.scales = weight.zeros.float(), weight.scales.to(setting.dtype).float()
        self.size = weight.channels_per_group

    def forward(self, x: Tensor) -> Tensor:
        groups = zip(self.codes.split(self.size), self.zeros, self.scales, strict=True)
        parts = [(codes - zeros, scales) for codes, zeros, scales in groups]
        pieces = zip(x.float().split(self.size, dim=-1), parts, strict=True)
        return (self.factor * sum(piece @ codes * scales for piece, (codes, scales) in pieces)).to(x.dtype)


class Codes(Operator):
    """A toy for 8-bit weights without activation order that claims to be fast."""

    name = "codes"

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor
        self.compiled: list[nn.Module] = []

    def refusal(self, stored: StoredWeight, setting: Setting) -> str | None:
        if stored.scheme.element.name != "int8":
            return f"{stored.scheme.element.name} weights; the toy takes int8"
        return "activation order" if stored.scheme.act_order else None

    def estimate(self, stored: StoredWeight, setting: Setting, rows: int) -> Estimate:
        return Estimate(1e-6 * rows, "the toy's product")

    def build(self, stored: StoredWeight, bias: Tensor | None, setting: Setting) -> nn.Module:
        return CodesLinear(stored, bias, setting, self.factor)

    def compile(self, modules: Iterable[nn.Module], setting: Setting, progress: object) -> int:
        self.compiled += modules
        return len(self.compiled)


@pytest.fixture
def toy() -> Iterator[Codes]:
    operator = Codes()
    register_operator(operator)
    yield operator
    del OPERATORS[operator.name]


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
def test_a_registered_operator_runs_a_model(layout: str, toy: Codes, tmp_path: Path) -> None:
    reference = tiny_model("llama")
    save_quantized(tmp_path, reference, layout, random_quantizer(bits=8))
    loaded = load(tmp_path, device="cpu")
    assert {decision.operator for decision in loaded.decisions.values()} == {"codes"}
    modules = [module for module in loaded.model.modules() if isinstance(module, CodesLinear)]
    assert len(modules) == len(loaded.decisions) == len(toy.compiled) > 0
    assert relative(logits(loaded.model), logits(reference)) < FLOAT32
    result = generate(loaded, PROMPT, max_new_tokens=4)
    assert any("codes: the toy's product; not dense: torch's product" in note for note in result.notes)
    bench = bench_decode(loaded, contexts=(4,), new_tokens=2).render()
    assert "codes: the toy's product" in bench
    assert "not w8a16: a CPU runs its reference" in bench


def test_weights_that_an_operator_refuses_go_to_another(toy: Codes, tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    loaded = load(tmp_path, device="cpu", operator="codes")
    assert {decision.operator for decision in loaded.decisions.values()} == {"dense"}
    assert any("not codes: int4 weights; the toy takes int8" in line for line in loaded.report())


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_verify_runs_it_against_float64(factor: float, toy: Codes, tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer(bits=8))
    toy.factor = factor
    view = QuantizedCheckpoint.of(Checkpoint.open(tmp_path))
    assert view is not None
    check = kernel_check.compare_kernels(view, torch.device("cpu"), lambda *_: None)
    assert check.status == ("passed" if factor == 1 else "failed"), check
    assert all("codes" in problem for problem in check.problems)


def test_every_operator_multiplies_with_the_same_weight() -> None:
    q = random_tuple(128, 192, group_size=32, symmetric=False)
    bias, x = torch.randn(192), torch.randn(3, 128)
    expected = torch.nn.functional.linear(x, q.dequantize(), bias)
    for layout in ("gptq", "awq", "compressed-tensors"):
        stored = stored_weight(q, layout)
        for name in ("dense", "w4a16"):
            assert OPERATORS[name].refusal(stored, CPU) is None
            found = OPERATORS[name].build(stored, bias, CPU)(x)
            # One float32 product of 128 terms against another.
            atol = 128 * 2**-24 * float(expected.abs().max())
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)


class Nibbles(GPTQ):
    """GPTQ words whose codes are places in a table."""

    elements = ("toy4",)


def test_elements_that_no_kernel_takes_run_dense() -> None:
    table = Element("toy4", 4, tuple(float((3 * place) % 16 - 8) for place in range(16)))
    q = replace(random_tuple(64, 64, group_size=32), element=table)
    q = replace(q, zeros=torch.zeros_like(q.zeros))
    layout = Nibbles(2)
    stored = replace(stored_weight(random_tuple(64, 64, group_size=32)), layout=layout)
    stored = replace(stored, tensors=layout.pack(q), spec=replace(stored.spec, scheme=q.scheme))
    found = decide(stored, CPU, operator="w4a16")
    assert (found.operator, "toy4 weights" in found.reason) == ("dense", True)
    x = torch.randn(3, 64)
    module = OPERATORS["dense"].build(stored, None, CPU)
    assert torch.equal(module(x), torch.nn.functional.linear(x, q.dequantize()))


def test_a_checkpoint_in_the_kernels_layout_is_taken_as_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words and scales of the model are the very tensors that were read, bit for bit and in place."""

    def whole(name: str, weight: Tensor) -> object:
        return quantize(name, weight) if weight.shape[0] % 64 == 0 else None

    quantize = random_quantizer(group_size=64)
    save_quantized(tmp_path, tiny_model("llama"), "marlin", whole)
    layout, read, original = INTEGERS["marlin"], {}, ReadAhead.tensor

    def tensor(self: ReadAhead, name: str) -> Tensor:
        return read.setdefault(name, original(self, name))

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ReadAhead, "tensor", tensor)
    for method in ("pack", "pack_grid", "unpack", "unpack_grid", "from_natural", "to_natural"):
        monkeypatch.setattr(layout, method, forbidden)
    for function in ("permute_scales", "marlin_operand"):
        monkeypatch.setattr(f"marlinq.runtime.kernel_operand.{function}", forbidden)
    loaded = load(tmp_path, device="cpu", dtype="float16", operator="w4a16")
    assert len(loaded.decisions) > 0
    for name in loaded.decisions:
        module = loaded.model.get_submodule(name)
        assert isinstance(module, QuantLinear)
        for mine, suffix in ((module.words, layout.key), (module.scales, layout.scale_key)):
            stored = read[f"{name}.{suffix}"]
            assert mine.data_ptr() == stored.data_ptr()
            assert torch.equal(mine, Checkpoint.open(tmp_path).tensor(f"{name}.{suffix}"))


def test_all_shapes_of_a_model_are_compiled_together_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def precompile_model(
        layers: list[LayerShape], dtype: torch.dtype, index: int, *, progress: ReportProgress
    ) -> int:
        asked.append((set(layers), dtype, index))
        progress("compiling kernels", 6, 6)
        return 6

    monkeypatch.setattr(packed, "precompile_model", precompile_model)
    narrow, wide = (
        OPERATORS["w4a16"].build(stored_weight(q), None, Setting(CPU.device, torch.bfloat16))
        for q in (
            random_tuple(128, 72, group_size=32, symmetric=False),
            random_tuple(320, 192, group_size=192),
        )
    )
    stages: list[tuple[str, int, int]] = []
    modules = [narrow, wide, narrow]
    gpu = Setting(torch.device("cuda:1"), torch.bfloat16)
    assert OPERATORS["w4a16"].compile(modules, gpu, lambda *stage: stages.append(stage)) == 6
    # Columns and channels after padding, and the group that the kernel sees.
    assert asked == [
        (
            {
                LayerShape(n=128, k=128, granularity=Granularity.group(32), zeros=True, format=INT4),
                LayerShape(n=192, k=320, granularity=Granularity.group(64), zeros=False, format=INT4),
            },
            torch.bfloat16,
            1,
        ),
    ]
    assert stages == [("compiling kernels", 6, 6)]
    assert OPERATORS["w4a16"].compile(modules, CPU) == 0
    assert OPERATORS["w4a16"].compile([nn.Linear(64, 64)], gpu) == 0
    assert len(asked) == 1
