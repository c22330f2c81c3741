from __future__ import annotations

from pathlib import Path

import pytest
import torch

from marlinq.operations.quantize import quantize
from tests.testing.original_folders import RECIPE, folder_bytes
from tests.testing.tiny_models import tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def source(tmp_path: Path) -> Path:

    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_gpu_and_cpu_give_nearly_the_same_codes(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="reading calibration text needs datasets")
    text = tmp_path / "text.jsonl"
    text.write_text('{"input_ids": ' + str([3 + (11 * n) % 120 for n in range(64)]) + "}\n")
    recipe = RECIPE.replace(calibration=str(text), samples=1, max_length=64)
    there = quantize(source, tmp_path / "gpu", recipe=recipe, device="cuda")
    here = quantize(source, tmp_path / "cpu", recipe=recipe, device="cpu")
    assert there.peak_device_bytes is not None
    assert there.peak_device_bytes > 0
    # So small a model takes no time, so the GPU computes as the CPU does.
    assert there.dtype == here.dtype == "float32"
    for name, report in here.modules.items():
        # Sums in another order: statistics agree to some 2**-20, but a weight that lies between two codes may
        # go the other way, and the weights behind it follow.
        assert there.modules[name].relative_error == pytest.approx(report.relative_error, rel=0.1)


def test_a_run_on_the_gpu_is_resumed_byte_for_byte(source: Path, tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "quantising blocks" and done == 1:
            raise KilledError

    quantize(source, tmp_path / "whole", recipe=RECIPE, device="cuda")
    with pytest.raises(KilledError):
        quantize(source, tmp_path / "out", recipe=RECIPE, device="cuda", progress=stop)
    quantize(source, tmp_path / "out", recipe=RECIPE, device="cuda", resume=True)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
