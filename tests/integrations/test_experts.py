"""Experts stay packed through ``from_pretrained``, which turns them into dense weights by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from marlinq.operations.quantize import Recipe, quantize
from marlinq.runtime import load
from marlinq.runtime.packed_experts import PackedExperts
from tests.testing.mixtures import save_mixture


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "glm-4.5", "qwen3.5-moe", "granite-moe"])
def test_from_pretrained_keeps_experts_packed(name: str, tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", name)
    recipe = Recipe(group_size=32, method="rtn", format="compressed-tensors")
    quantize(tmp_path / "model", tmp_path / "int4", recipe=recipe, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "int4", dtype=torch.float32)
    packed = [module for module in model.modules() if isinstance(module, PackedExperts)]
    assert packed
    loaded = load(tmp_path / "int4", device="cpu", dtype="float32")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded.model(ids).logits)
