"""No check fires on an undamaged checkpoint, whatever it is made of."""

from __future__ import annotations

import pytest
import torch

from marlinq.checkpoint import MANIFEST
from marlinq.core.errors import UsageError
from marlinq.formats import LAYOUTS
from marlinq.operations.verify import verify
from tests.testing.faults import copy
from tests.testing.layouts import INTEGERS
from tests.testing.pairs import every_value
from tests.testing.verified_checkpoints import save_original, save_quantized

CASES = [
    (layout, group_size, symmetric, act_order)
    for layout in INTEGERS
    for group_size in (32, 64, 128, -1)
    for symmetric in (True, False)
    for act_order in ("none", "static", "scattered")
    if (symmetric or layout != "marlin")
    and (act_order != "scattered" or (layout.startswith("gptq") and group_size != -1))
]


def statuses(report):
    return {check.name: check.status for check in report.checks}


@pytest.mark.parametrize(("layout", "group_size", "symmetric", "act_order"), every_value(CASES))
def test_clean_checkpoints_pass(original, quantized, layout, group_size, symmetric, act_order):
    folder = quantized(layout, group_size=group_size, symmetric=symmetric, act_order=act_order)
    report = verify(folder, against=original)
    found = [(check.name, check.detail) for check in report.checks if check.status == "failed"]
    assert not found
    rows = statuses(report)
    assert {name for name, status in rows.items() if status == "warning"} <= {"weights"}
    assert [name for name, status in rows.items() if status == "skipped"] == (
        [] if torch.cuda.is_available() else ["kernels"]
    )
    assert report.ok
    assert len(report.modules) == 7
    assert all(module.relative_error is not None and not module.problems for module in report.modules)


def test_manifest_is_optional_and_its_absence_is_said(quantized, tmp_path):
    report = verify(copy(quantized("gptq"), tmp_path / "copy", manifest=False))
    assert report.ok
    row = next(check for check in report.checks if check.name == "manifest")
    assert row.status == "skipped"
    assert MANIFEST in row.detail
    assert report.verdict == "verified: structure only"
    (row,) = [check for check in report.checks if check.name == "original"]
    assert row.status == "skipped"
    assert "--against" in row.detail
    assert verify(quantized("gptq")).verdict == "verified"


def test_layouts_for_other_weights_are_not_listed(quantized):
    """Layouts of integers that refuse are named with a reason; those of floats and sparse weights are not."""
    report = verify(quantized("gptq", symmetric=False, group_size=128))
    (row,) = [check for check in report.checks if check.name == "other formats"]
    assert "marlin can't hold 7" in row.detail
    assert not [
        name for name, layout in LAYOUTS.items() if "int4" not in layout.elements and name in row.detail
    ]
    assert "marlin-24" not in row.detail


def test_skipped_modules_are_fine_when_the_config_says_so(original, tmp_path):
    skip = ("model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj")
    # One layout for each way of writing a config.
    for layout in ("gptq", "awq", "compressed-tensors"):
        folder = save_quantized(original, tmp_path / layout, layout, skip=skip)
        report = verify(folder, against=original)
        assert report.ok, report.render()
        assert len(report.modules) == 5


def test_tied_embeddings(tmp_path):
    source = save_original(tmp_path / "tied", tied=True)
    folder = save_quantized(source, tmp_path / "out", "gptq")
    report = verify(folder, against=source)
    assert report.ok, report.render()
    assert statuses(report)["tensors"] == "passed"


def test_another_conversion(quantized):
    report = verify(quantized("awq"), against=quantized("compressed-tensors"))
    assert report.ok, report.render()
    assert statuses(report)["weights"] == "passed"
    other = verify(quantized("awq"), against=quantized("awq", group_size=64))
    assert not other.ok
    assert statuses(other)["weights"] == "failed"


def test_a_checkpoint_is_not_compared_with_itself(quantized, tmp_path):
    folder = quantized("gptq")
    (tmp_path / "link").symlink_to(folder)
    for same in (folder, tmp_path / "link"):
        with pytest.raises(UsageError, match="is the checkpoint itself"):
            verify(folder, against=same)
