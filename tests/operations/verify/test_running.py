"""Checks that run something: kernels and whole models."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.errors import CheckpointError, UsageError
from marlinq.operations.verify import kernel_check, verify
from marlinq.runtime.operators.packed import Packed
from tests.testing import faults
from tests.testing.layouts import INTEGERS


def silent(stage, done, total):
    pass


def rows(report):
    return {check.name: check for check in report.checks}


@pytest.mark.parametrize("options", [{}, {"symmetric": False}, {"group_size": -1}])
def test_kernel_reference_is_within_the_bounds(quantized, options):
    view = QuantizedCheckpoint.of(Checkpoint.open(quantized("awq", **options)))
    check = kernel_check.compare_kernels(view, torch.device("cpu"), silent)
    assert check.status == "passed", check
    # Three numbers of rows: the kernel's reference in two dtypes, torch's packed product in bfloat16.
    assert check.detail.startswith("4 shapes, 36 products")
    # Operators for other elements are not among those that refuse.
    assert "; 4 refused (model.layers.0.mlp.down_proj: int4pack: it multiplies in bfloat16" in check.detail


def test_a_wrong_product_is_reported(quantized, monkeypatch):
    def wrong(self, stored, bias, setting):
        linear = torch.nn.Linear(stored.in_features, stored.out_features, bias=False, dtype=setting.dtype)
        linear.weight.data = stored.weight().dequantize(setting.dtype) * 1.01
        return linear

    monkeypatch.setattr(Packed, "build", wrong)
    view = QuantizedCheckpoint.of(Checkpoint.open(quantized("gptq")))
    check = kernel_check.compare_kernels(view, torch.device("cpu"), silent)
    assert check.status == "failed"
    assert len(check.problems) == 24


def test_without_a_gpu_the_row_says_so(quantized):
    row = rows(verify(quantized("gptq"), device="cpu"))["kernels"]
    assert row.status == "skipped"
    assert "the kernel was not run" in row.detail


@pytest.mark.gpu
@pytest.mark.parametrize("layout", INTEGERS)
def test_kernels_on_a_gpu(quantized, layout):
    report = verify(quantized(layout), device="cuda")
    assert rows(report)["kernels"].status == "passed", report.render()


def test_logits_of_another_model_are_not_compared(quantized, tmp_path):
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    found = rows(verify(quantized("gptq"), against=tmp_path / "other", logits=True, device="cpu"))
    assert found["layers"].status == "failed"
    assert "blocks of width 128 and a vocabulary of 128" in found["layers"].detail
    assert "3 blocks of width 64 and a vocabulary of 96: not the same model" in found["layers"].detail
    assert found["logits"].status == "skipped"


def test_logits_against_the_original(original, quantized):
    report = verify(quantized("compressed-tensors"), against=original, logits=True, device="cpu")
    assert report.ok, report.render()
    found = rows(report)
    assert found["layers"].status == found["logits"].status == "passed"
    assert "round-to-nearest has KL" in found["logits"].detail


def test_logits_that_quantisation_does_not_explain_fail(original, quantized, tmp_path):
    folder = faults.copy(quantized("gptq"), tmp_path / "copy", manifest=False)
    for module in ("mlp.down_proj", "self_attn.o_proj"):
        faults.change(folder, f"model.layers.0.{module}.scales", torch.neg)
    report = verify(folder, against=original, logits=True, device="cpu")
    assert not report.ok
    row = rows(report)["logits"]
    assert row.status == "failed", row.detail
    assert "expected of these weights" in row.detail


def test_logits_of_two_conversions_agree(quantized):
    folder, other = quantized("marlin"), quantized("gptq")
    report = verify(folder, against=other, logits=True, device="cpu")
    assert report.ok, report.render()
    assert "same top token 100.0%" in rows(report)["logits"].detail


def test_logits_of_a_damaged_conversion_differ(quantized, tmp_path):
    folder = faults.copy(quantized("marlin"), tmp_path / "copy", manifest=False)
    faults.change(folder, "model.layers.0.mlp.up_proj.B", faults.swap_nibbles)
    report = verify(folder, against=quantized("gptq"), logits=True, device="cpu")
    failed = {name for name, check in rows(report).items() if check.status == "failed"}
    assert failed >= {"weights", "layers"}
    assert "block 0" in rows(report)["layers"].detail


def test_logits_need_an_original(quantized):
    with pytest.raises(UsageError, match="--against"):
        verify(quantized("gptq"), logits=True)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(CheckpointError):
        verify(tmp_path / "nothing")


def test_not_a_quantised_checkpoint(original):
    report = verify(original)
    assert not report.ok
    assert "not a quantised checkpoint" in rows(report)["config"].detail


def test_report_values(original, quantized):
    stages = []
    report = verify(
        quantized("gptq"), against=original, progress=lambda stage, done, total: stages.append((stage, done))
    )
    assert {stage for stage, _ in stages} >= {"hashing tensors", "checking modules"}
    plain = report.to_dict()
    assert plain["ok"] is True
    assert plain["checks"][0]["name"] == "files"
    ratios = [module["ratio"] for module in plain["modules"]]
    assert ratios == sorted(ratios, reverse=True)
    assert report.render().endswith("verified")
