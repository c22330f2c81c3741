"""On a GPU: the kernel inside a model, and the captured decode step."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from marlinq.checkpoint import Checkpoint, ReadAhead, read_ahead
from marlinq.core.devices import read_clock
from marlinq.core.weight import QuantizedWeight
from marlinq.runtime import (
    GREEDY,
    OPERATORS,
    Decoder,
    Generation,
    Interrupted,
    QuantLinear,
    Sampling,
    Setting,
    generate,
    load,
    stored_operand,
)
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.forward_choice import choose_forward
from marlinq.runtime.step.transformers_forward import TransformersForward
from tests.testing.layouts import INTEGERS
from tests.testing.near_ties import is_near_tie
from tests.testing.runnable_folders import (
    random_quantizer,
    random_tuple,
    save_plain,
    save_quantized,
    save_tokenizer,
    stored_weight,
)
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
    # Falcon, which is not recognised, indexes its heads with Python lists where it is multi_query. They
    # become tensors on the CPU: copies that no graph can hold.
    if name == "falcon":
        assert found.step.mode == "eager"
        assert "Cannot copy between CPU and CUDA" in found.step.reason
    else:
        assert found.step.mode == "cuda-graph", found.step.reason
        assert "dependent launches a step" in found.step.reason
    if found.tokens != expected.tokens:
        pairs = zip(found.tokens, expected.tokens, strict=True)
        place = next(place for place, (mine, theirs) in enumerate(pairs) if mine != theirs)
        assert is_near_tie(on_cpu.model, [*PROMPT, *expected.tokens[:place]]), place


@pytest.mark.parametrize("layout", INTEGERS)
@pytest.mark.parametrize("shape", [(256, 128, 64), (512, 192, 256), (80, 72, -1), (256, 64, -1)])
def test_operands_made_on_the_gpu_are_those_made_on_the_cpu(layout: str, shape: tuple[int, int, int]) -> None:
    k, n, group_size = shape
    q = random_tuple(k, n, group_size=group_size, symmetric=layout == "marlin")
    if (reason := INTEGERS[layout].refusal(q)) is not None:
        pytest.skip(reason)
    stored = stored_weight(q, layout)
    gpu = torch.device("cuda:0")
    expected = stored_operand(stored, torch.float16, torch.device("cpu"))
    there = replace(stored, tensors={suffix: tensor.to(gpu) for suffix, tensor in stored.tensors.items()})
    for found in (stored_operand(stored, torch.float16, gpu), stored_operand(there, torch.float16, gpu)):
        for name in ("words", "scales", "zeros"):
            mine, theirs = getattr(found, name), getattr(expected, name)
            assert (mine is None) == (theirs is None)
            if theirs is not None:
                assert mine.is_cuda
                assert torch.equal(mine.cpu(), theirs)


def test_activation_order_is_sorted_on_the_gpu() -> None:
    stored = stored_weight(random_tuple(256, 128, group_size=64, symmetric=False, act_order=True))
    gpu = torch.device("cuda:0")
    there = replace(stored, tensors={suffix: tensor.to(gpu) for suffix, tensor in stored.tensors.items()})
    expected = stored_operand(stored, torch.float16, torch.device("cpu"))
    found = stored_operand(there, torch.float16, gpu)
    for name in ("words", "scales", "zeros", "order"):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


@pytest.mark.parametrize("budget", [0, 1 << 20, 1 << 40])
def test_tensors_read_ahead_to_the_gpu_are_the_stored_ones(
    budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small pieces go round a small ring many times, and memory that is freed is used again at once."""
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 4096)
    monkeypatch.setattr(read_ahead, "RING_BYTES", 8 * 4096)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"tensor.{index}": torch.randint(-(2**31), 2**31, (size,), generator=generator).to(torch.int32)
        for index, size in enumerate((1, 1023, 1024, 1025, 300_000) * 12)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    gpu = torch.device("cuda:0")
    with ReadAhead(Checkpoint.open(tmp_path), gpu, budget=budget) as reader:
        reader.expect(tensors)
        kept = {}
        for index, name in enumerate(tensors):
            found = reader.tensor(name)
            # Half of them are freed while work on them is queued.
            kept[name] = found if index % 2 else found + 1
        for index, (name, found) in enumerate(kept.items()):
            assert torch.equal(found.cpu(), tensors[name] + (0 if index % 2 else 1)), name


@pytest.mark.parametrize("layout", INTEGERS)
def test_a_model_loaded_to_the_gpu_has_the_cpus_operands(layout: str, tmp_path: Path) -> None:
    quantize = random_quantizer(symmetric=layout == "marlin")

    def whole(name: str, weight: Tensor) -> QuantizedWeight | None:
        return quantize(name, weight) if weight.shape[0] % 64 == 0 else None

    save_quantized(tmp_path, tiny_model("llama"), layout, whole)
    on_cpu = load(tmp_path, device="cpu", dtype="float16", operator="w4a16")
    on_gpu = load(tmp_path, device="cuda", dtype="float16", operator="w4a16")
    assert on_gpu.timings.read_bytes == Checkpoint.open(tmp_path).nbytes
    for name in on_cpu.decisions:
        mine, theirs = on_gpu.model.get_submodule(name), on_cpu.model.get_submodule(name)
        for key, tensor in theirs.named_buffers():
            assert torch.equal(getattr(mine, key).cpu(), tensor), (name, key)
    for name, parameter in on_cpu.model.named_parameters():
        assert torch.equal(on_gpu.model.get_parameter(name).cpu(), parameter), name


@pytest.mark.parametrize("layout", INTEGERS)
def test_transcoding_needs_no_room_for_unpacked_codes(layout: str) -> None:
    k = n = 8192
    stored = stored_weight(random_tuple(k, n, group_size=128), layout)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    operand = stored_operand(stored, torch.float16, torch.device("cuda:0"))
    peak = torch.cuda.max_memory_allocated() - before
    # The words as read and as transcoded, and the scales. Codes would be twice the words.
    copies = 1 if layout == "marlin" else 2
    assert peak < copies * operand.words.nbytes + 2 * operand.scales.nbytes + 16 * 2**20


def test_load_compiles_the_kernels_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_quantized(tmp_path / "model", tiny_model("llama"), "gptq", random_quantizer())
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path / "cache"))
    stages: list[tuple[str, int, int]] = []
    loaded = load(tmp_path / "model", device="cuda", progress=lambda *stage: stages.append(stage))
    compiling = [stage for stage in stages if stage[0] == "compiling kernels"]
    assert compiling[-1][1] == compiling[-1][2] > 0
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
@pytest.mark.parametrize("own", [False, True])
def test_replayed_steps_give_the_logits_of_eager_ones(
    dtype: str, batch: int, own: bool, tmp_path: Path
) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    loaded = load(tmp_path, device="cuda", dtype=dtype)

    def made() -> Forward:
        if own:
            return choose_forward(loaded, batch, 64)
        return TransformersForward(loaded.model, batch=batch, capacity=64, reason="a test")

    captured, eager = Decoder(made()), Decoder(made(), graphs=False)
    assert captured.decision.mode == "cuda-graph", captured.decision.reason
    assert eager.decision.mode == "eager"
    assert own != isinstance(captured.forward, TransformersForward)
    tolerance = 16 * torch.finfo(getattr(torch, dtype)).eps
    prompts = [torch.randint(128, (length,)).tolist() for length in range(3, 3 + batch)]
    for _ in range(2):
        # A second prompt starts over in the same cache.
        for decoder in (captured, eager):
            decoder.begin(prompts)
            decoder.read()
        for _ in range(14):
            tokens = torch.randint(128, (batch,), device="cuda")
            for decoder in (captured, eager):
                assert decoder._sampler is not None
                decoder._sampler.state.tokens.copy_(tokens)
            captured.advance()
            captured.read()
            expected = eager.forward.step(tokens).float()
            assert captured._logits is not None
            found = captured._logits.float()
            assert float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)])
def test_graphs_and_visits_do_not_change_the_tokens(sampling: Sampling, tmp_path: Path) -> None:
    """The same forward eager and captured, steps queued one by one or many at once: the same kernels on the
    same numbers, so the same tokens."""
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    loaded = load(tmp_path, device="cuda", dtype="float16")
    prompts = [[1, 9, 30, 77], [5], [40, 41, 42]]
    found = []
    for graphs, steps in ((False, 1), (True, 1), (True, 8)):
        decoder = Decoder(choose_forward(loaded, 3, 256), sampling.shape, graphs=graphs)
        decoder.begin(prompts, sampling)
        tokens = decoder.read()
        while len(tokens) < 161:
            decoder.advance(steps)
            decoder.advance(steps)
            tokens += decoder.read() + decoder.read()
        found.append(tokens[:161])
    assert found[0] == found[1] == found[2]


def test_ten_thousand_tokens_need_constant_memory_on_the_gpu(tmp_path: Path) -> None:
    save_plain(tmp_path, tiny_model("llama"))
    loaded = load(tmp_path, device="cuda", dtype="float16")
    loaded.model.config.max_position_embeddings = 16384
    loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = None
    generate(loaded, PROMPT, max_new_tokens=10_000)
    torch.cuda.synchronize()
    before, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    cupy = pytest.importorskip("cupy")
    reserved, pooled = torch.cuda.memory_reserved(), cupy.get_default_memory_pool().total_bytes()
    for _ in range(2):
        assert len(generate(loaded, PROMPT, max_new_tokens=10_000).tokens) == 10_000
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() == peak
    # The device's free memory would count other processes too.
    assert torch.cuda.memory_reserved() == reserved
    assert cupy.get_default_memory_pool().total_bytes() == pooled


@pytest.mark.timed
def test_a_second_call_begins_at_once(tmp_path: Path) -> None:
    """A kept decoder adds 30 ms to reading the prompt at most."""
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    loaded = load(tmp_path, device="cuda", dtype="float16")
    generate(loaded, PROMPT, max_new_tokens=16)
    decoder = next(iter(loaded.decoders._kept.values()))
    ids = torch.tensor([PROMPT], device="cuda")
    lengths = torch.tensor([len(PROMPT)], dtype=torch.int32)
    decoder.forward.prefill(ids, lengths)
    start = read_clock(loaded.device)
    decoder.forward.prefill(ids, lengths)
    prefill = read_clock(loaded.device) - start
    start = time.perf_counter()
    result = generate(loaded, PROMPT, max_new_tokens=2)
    assert time.perf_counter() - start < prefill + 0.1
    assert result.prefill_seconds < prefill + 0.03


def test_an_interrupt_leaves_the_gpu_usable(tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    save_tokenizer(tmp_path)
    loaded = load(tmp_path, device="cuda", dtype="float16")
    loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = None
    whole = generate(loaded, PROMPT, max_new_tokens=100)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted) as raised:
        generate(loaded, PROMPT, max_new_tokens=100, on_text=interrupt)
    came = raised.value.partial
    assert isinstance(came, Generation)
    assert came.tokens == whole.tokens[: len(came.tokens)]
    assert generate(loaded, PROMPT, max_new_tokens=100).tokens == whole.tokens


def test_float32_runs_dense_with_a_warning_and_eight_bits_packed(tmp_path: Path) -> None:
    save_quantized(tmp_path / "4", tiny_model("llama"), "gptq", random_quantizer())
    with pytest.warns(UserWarning, match="dense weights on cuda:0.*not float32"):
        load(tmp_path / "4", device="cuda", dtype="float32")
    save_quantized(tmp_path / "8", tiny_model("llama"), "gptq", random_quantizer(bits=8))
    loaded = load(tmp_path / "8", device="cuda", dtype="float16", operator="w8a16")
    assert {decision.operator for decision in loaded.decisions.values()} == {"w8a16"}
    with pytest.warns(UserWarning, match="dense weights on cuda:0.*as asked"):
        expected = load(tmp_path / "8", device="cuda", dtype="float16", operator="dense")
    ids = torch.arange(8, device="cuda")[None]
    with torch.no_grad():
        found, wanted = (each.model(input_ids=ids).logits.float() for each in (loaded, expected))
    assert (found - wanted).norm() < 5e-3 * wanted.norm()
