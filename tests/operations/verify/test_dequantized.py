"""Modules that ``convert --skip-unsupported`` dequantised, against the original."""

from __future__ import annotations

import json

import pytest
import torch

from marlinq.checkpoint import MANIFEST, Checkpoint
from marlinq.operations.convert import convert
from marlinq.operations.verify import verify
from tests.testing import faults
from tests.testing.verified_checkpoints import save_original, save_quantized

# One key-value head of 32 channels: too narrow for a tile of Marlin's.
SKIPPED = [f"model.layers.0.self_attn.{name}" for name in ("k_proj", "v_proj")]


@pytest.fixture(scope="module", params=["marlin", "awq"])
def folders(request, tmp_path_factory):
    """The original, and a conversion of its quantised form that had to dequantise modules."""
    root = tmp_path_factory.mktemp("skipped")
    original = save_original(root / "original", kv_heads=1)
    quantized = save_quantized(original, root / "gptq", "gptq", group_size=64)
    convert(quantized, root / "marlin", target_format="marlin", skip_unsupported=True)
    if request.param == "awq":
        # A second conversion carries what the first dequantised: its manifest holds the first one's.
        convert(root / "marlin", root / "awq", target_format="awq")
    return original, root / request.param


def row(report, name="unquantised tensors"):
    return next(check for check in report.checks if check.name == name)


def test_dequantised_modules_are_judged_as_quantised_ones(folders):
    original, folder = folders
    report = verify(folder, against=original)
    assert report.ok, report.render()
    assert row(report).status == "passed"
    assert f"{len(SKIPPED)} dequantised by a conversion" in row(report).detail


def changed(folders, tmp_path, edit):
    original, folder = folders
    copy = faults.copy(folder, tmp_path / "copy", manifest=True)
    faults.change(copy, f"{SKIPPED[0]}.weight", edit)
    return row(verify(copy, against=original))


def test_another_weight_is_not_let_through(folders, tmp_path):
    check = changed(folders, tmp_path, lambda weight: weight.flip(0))
    assert check.status == "failed"
    assert SKIPPED[0] in check.detail
    assert "times round-to-nearest's" in check.detail


def test_values_between_the_codes_are_not_let_through(folders, tmp_path):
    original, _ = folders
    weight = Checkpoint.open(original).tensor(f"{SKIPPED[0]}.weight")
    check = changed(folders, tmp_path, lambda stored: weight.to(stored.dtype))
    assert check.status == "failed"
    assert "different values, int4 has 16" in check.detail


def test_only_modules_that_the_manifest_names_may_be_dequantised(folders, tmp_path):
    original, folder = folders
    copy = faults.copy(folder, tmp_path / "copy", manifest=False)
    check = row(verify(copy, against=original))
    assert check.status == "failed"
    assert sum("differs from the original" in problem for problem in check.problems) == len(SKIPPED)


def test_a_manifest_that_does_not_say_how(folders, tmp_path):
    original, folder = folders
    copy = faults.copy(folder, tmp_path / "copy", manifest=True)
    manifest = json.loads((copy / MANIFEST).read_text())
    level = manifest if manifest["skipped"] else manifest["source"]
    level["source_quantization_config"] = {"quant_method": "nonsense"}
    (copy / MANIFEST).write_text(json.dumps(manifest))
    check = row(verify(copy, against=original))
    assert check.status == "failed"
    assert "marlinq.json: source_quantization_config: quant_method 'nonsense' is not" in check.problems[0]


def test_a_stray_value_in_a_kept_tensor_still_fails(folders, tmp_path):
    original, folder = folders
    copy = faults.copy(folder, tmp_path / "copy", manifest=True)
    faults.change(
        copy, "model.norm.weight", lambda tensor: tensor + torch.eye(1, len(tensor))[0].to(tensor.dtype)
    )
    check = row(verify(copy, against=original))
    assert (check.status, len(check.problems)) == ("failed", 1)
