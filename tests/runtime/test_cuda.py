"""On a GPU: the kernel inside a model, and the captured decode step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from marlinq.formats import LAYOUTS
from marlinq.runtime import OPERATORS, Decoder, QuantLinear, Setting, generate, load, stored_operand
from tests.testing.near_ties import is_near_tie
from tests.testing.runnable_folders import random_quantizer, random_tuple, save_quantized, stored_weight
from tests.testing.tiny_models import tiny_model

pytestmark = pytest.mark.gpu

PROMPT = [1, 9, 30, 77]


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(256, 128, 64), (512, 192, 256), (80, 72, -1), (256, 64, -1)])
def test_operands_made_on_the_gpu_are_those_made_on_the_cpu(layout: str, shape: tuple[int, int, int]) -> None:
    k, n, group_size = shape
    q = random_tuple(k, n, group_size=group_size, symmetric=layout == "marlin")
    if (reason := LAYOUTS[layout].refusal(q)) is not None:
        pytest.skip(reason)
    stored = stored_weight(q, layout)
    expected = stored_operand(stored, torch.float16, torch.device("cpu"))
    found = stored_operand(stored, torch.float16, torch.device("cuda:0"))
    for name in ("words", "scales", "zeros"):
        mine, theirs = getattr(found, name), getattr(expected, name)
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert mine.is_cuda
            assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transcoding_needs_no_room_for_unpacked_codes(layout: str) -> None:
    k = n = 8192
    stored = stored_weight(random_tuple(k, n, group_size=128), layout)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    operand = stored_operand(stored, torch.float16, torch.device("cuda:0"))
    peak = torch.cuda.max_memory_allocated() - before
    # The words as read and as transcoded, the scales, and slabs of a megabyte. Codes would be twice the
    # words.
    copies = 1 if layout == "marlin" else 2
    assert peak < copies * operand.words.nbytes + 2 * operand.scales.nbytes + 16 * 2**20


def test_load_compiles_the_kernels_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized(tmp_path / "model", tiny_model("llama"), "gptq", random_quantizer())
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path / "cache"))
    stages: list[tuple[str, int, int]] = []
    loaded = load(tmp_path / "model", device="cuda", progress=lambda *stage: stages.append(stage))
    assert stages[-1][0] == "compiling kernels"
    assert stages[-1][1] == stages[-1][2]
    modules = [loaded.model.get_submodule(name) for name in loaded.decisions]
    setting = Setting(loaded.device, loaded.dtype)
    assert OPERATORS["w4a16"].compile(modules, setting) == 0
    for decision in loaded.decisions.values():
        assert decision.chosen.seconds is not None
        other = next(other for other in decision.others if other.operator == "dense")
        assert other.seconds is not None
        assert decision.chosen.seconds < other.seconds


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
