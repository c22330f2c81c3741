"""On a GPU: the kernel inside a model, and the captured decode step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from marlinq.runtime import Decoder, QuantLinear, generate, load
from tests.testing.runnable_folders import random_quantizer, save_quantized
from tests.testing.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

PROMPT = [1, 9, 30, 77]


def is_near_tie(model: PreTrainedModel, ids: list[int]) -> bool:
    """Whether float16 may choose another next token: two logits within 2 % of the largest."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    first, second = logits.topk(2).values.tolist()
    return first - second < 0.02 * float(logits.abs().max())


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "qwen2", "gpt2", "gpt_neox", "falcon", "gemma2", "gemma3"]
)
def test_greedy_tokens_are_those_of_the_cpu_up_to_near_ties(name: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model(name), "gptq", random_quantizer(symmetric=False, act_order=True))
    on_cpu = load(tmp_path, device="cpu")
    on_gpu = load(tmp_path, device="cuda", dtype="float16")
    assert {decision.operator for decision in on_gpu.decisions.values()} == {"w4a16"}
    quantized = [module for module in on_gpu.model.modules() if isinstance(module, QuantLinear)]
    assert len(quantized) == len(on_gpu.decisions) > 0
    for loaded in (on_cpu, on_gpu):
        loaded.model.generation_config.eos_token_id = None
        loaded.model.config.eos_token_id = None
    expected = generate(on_cpu, PROMPT, max_new_tokens=64)
    found = generate(on_gpu, PROMPT, max_new_tokens=64)
    # With multi_query Falcon indexes its heads with Python lists, which become tensors on the CPU: copies
    # that no graph can hold.
    if name == "falcon":
        assert found.step.mode == "eager"
        assert "Cannot copy between CPU and CUDA" in found.step.reason
    else:
        assert found.step.mode == "cuda-graph", found.step.reason
    if found.tokens != expected.tokens:
        pairs = zip(found.tokens, expected.tokens, strict=True)
        place = next(place for place, (mine, theirs) in enumerate(pairs) if mine != theirs)
        assert is_near_tie(on_cpu.model, [*PROMPT, *expected.tokens[:place]]), place


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 5])
def test_replayed_steps_give_the_logits_of_eager_ones(dtype: str, batch: int, tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    model = load(tmp_path, device="cuda", dtype=dtype).model
    ids = torch.randint(0, 128, (batch, 20), device="cuda")
    captured = Decoder(model, batch=batch, max_length=40)
    eager = Decoder(model, batch=batch, max_length=40, graphs=False)
    assert captured.decision.mode == "cuda-graph", captured.decision.reason
    assert eager.decision.mode == "eager"
    tolerance = 16 * torch.finfo(getattr(torch, dtype)).eps
    for _ in range(2):
        # A second prompt starts over in the same cache.
        pairs = [(captured.prefill(ids[:, :6]), eager.prefill(ids[:, :6]))]
        pairs += [(captured.step(ids[:, i]).clone(), eager.step(ids[:, i])) for i in range(6, 20)]
        for found, expected in pairs:
            assert float((found - expected).float().norm() / expected.float().norm()) < tolerance


def test_float32_and_eight_bits_run_dense_with_a_warning(tmp_path: Path) -> None:
    save_quantized(tmp_path / "4", tiny_model("llama"), "gptq", random_quantizer())
    with pytest.warns(UserWarning, match="dense weights on cuda:0.*not float32"):
        load(tmp_path / "4", device="cuda", dtype="float32")
    save_quantized(tmp_path / "8", tiny_model("llama"), "gptq", random_quantizer(bits=8))
    with pytest.warns(UserWarning, match="dense weights on cuda:0.*int8 weights"):
        load(tmp_path / "8", device="cuda", dtype="float16")
