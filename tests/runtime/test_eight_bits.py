"""8-bit checkpoints, which no kernel takes yet, go through every command that runs a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from marlinq.core.scheme import INT8
from marlinq.core.weight import QuantizedWeight, trivial_g_idx
from marlinq.operations.bench import bench_decode
from marlinq.operations.evaluate import evaluate
from marlinq.operations.verify import verify
from marlinq.runtime import generate, load
from tests.runtime.test_generation import wide_model
from tests.testing.runnable_folders import save_plain, save_quantized, save_tokenizer
from tests.testing.schemes import quantized

REASON = "dense: torch's product with the dequantised weight; not w8a16: a CPU runs its reference"
TEXT = "It is a truth universally acknowledged, that a byte is a token.\n\nÄußerst schön! " * 8


def rounded(weight: Tensor, *, symmetric: bool, size: int = 32) -> QuantizedWeight:
    """``weight`` [N, K] on the 256 levels from the least to the largest of each group."""
    n, k = weight.shape
    groups = weight.t().reshape(k // size, size, n)
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / 254).half()
    zeros = torch.full_like(low, 128) if symmetric else torch.round(-low / scales)
    codes = torch.round(groups / scales[:, None] + zeros[:, None]).clamp(0, 255)
    return quantized(
        codes.reshape(k, n).to(torch.uint8),
        scales,
        zeros.to(torch.uint8),
        trivial_g_idx(k, size),
        size,
        INT8,
    )


@pytest.fixture(params=[("gptq", True), ("compressed-tensors", False)])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A quantised model and what it was made from, both with a tokenizer."""
    layout, symmetric = request.param
    original = save_plain(tmp_path / "original", wide_model())
    save_tokenizer(original)
    save_quantized(
        tmp_path / "quantized",
        wide_model(),
        layout,
        lambda _, weight: rounded(weight, symmetric=symmetric),
    )
    save_tokenizer(tmp_path / "quantized")
    return tmp_path / "quantized", original


def test_every_command_runs_them_and_says_how(folders: tuple[Path, Path], tmp_path: Path) -> None:
    quantized, original = folders
    loaded = load(quantized, device="cpu")
    notes = generate(loaded, "Once", max_new_tokens=4).notes
    assert any(REASON in note for note in notes)
    assert REASON in bench_decode(loaded, contexts=(8,), new_tokens=2).render()
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    found = evaluate(quantized, against=original, text=str(text), windows=2, length=64, device="cpu")
    # The divergence grows with the square of the step, which is 17 times finer than that of 4 bits: those
    # give 0.03 on this model.
    assert found.kl is not None
    assert 0 < found.kl < 1e-3
    report = verify(quantized, against=original, logits=True, device="cpu")
    assert report.ok, report.render()
