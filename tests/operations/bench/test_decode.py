"""The decode bench: what it counts, what it says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from marlinq.core.errors import UsageError
from marlinq.operations.bench import bench_decode
from marlinq.operations.bench.decode import weight_bytes
from marlinq.runtime import load
from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized
from tests.testing.tiny_models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer(symmetric=False))
    return tmp_path


def test_counts_and_figures(folder: Path) -> None:
    stages: list[str] = []
    found = bench_decode(
        folder, batch=2, prompt_tokens=24, new_tokens=6, device="cpu",
        progress=lambda stage, done, total: stages.append(f"{stage} {done}/{total}"),
    )  # fmt: skip
    assert (found.batch, found.prompt_tokens, found.new_tokens) == (2, 24, 6)
    assert found.prefill_tokens_per_second == pytest.approx(48 / found.first_token_seconds)
    assert found.decode_tokens_per_second == pytest.approx(2 / found.step_seconds)
    assert stages[-1] == "decode 6/6"
    assert "prefill 3/3" in stages
    value = json.loads(json.dumps(found.to_dict()))
    assert value["weight_bandwidth"] == pytest.approx(found.weight_bytes / found.step_seconds)


def test_says_that_no_gpu_was_used(folder: Path) -> None:
    rendered = bench_decode(folder, prompt_tokens=4, new_tokens=2, device="cpu").render()
    assert "no GPU was used" in rendered
    assert "dense: torch's product with the dequantised weight" in rendered
    assert f"torch {torch.__version__}" in rendered


@pytest.mark.parametrize("operator", ["dense", "w4a16"])
def test_weight_bytes_are_those_of_the_linears_and_norms(folder: Path, operator: str) -> None:
    model = load(folder, device="cpu", operator=operator).model
    # q, k, v, o, gate, up, down of three blocks as (K, N); hidden 64, two key-value heads of 16.
    shapes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)] * 3
    norms_and_head = 4 * (7 * 64 + 64 * 128)
    rotary = sum(buffer.nbytes for name, buffer in model.named_buffers() if "inv_freq" in name)
    if operator == "dense":
        linear_bytes = sum(4 * k * n for k, n in shapes)
    else:
        # Half a byte a code, and a float32 scale and zero for each group of 32; 32 columns grow to 64.
        linear_bytes = sum(k * max(n, 64) // 2 + 2 * 4 * (k // 32) * max(n, 64) for k, n in shapes)
    assert weight_bytes(model) == linear_bytes + norms_and_head + rotary


def test_a_tied_head_is_read_once(tmp_path: Path) -> None:
    tied = load(save_plain(tmp_path, tiny_model("gpt2")), device="cpu").model
    own = sum(parameter.nbytes for parameter in tied.parameters()) - tied.transformer.wpe.weight.nbytes
    assert weight_bytes(tied) == own


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch"),
        ({"new_tokens": 0}, "new_tokens"),
        ({"prompt_tokens": 100, "new_tokens": 29}, "129, but .* positions for 128"),
    ],
)
def test_wrong_requests_are_named(folder: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench_decode(folder, device="cpu", **options)
