"""Loaded models give the logits of a dense transformers model with the dequantised weights."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, TensorPlan, read_ahead
from marlinq.checkpoint.header import encode_header
from marlinq.core.errors import CheckpointError, UnsupportedError, UsageError
from marlinq.models.anatomy import Anatomy
from marlinq.models.recognise import anatomy_of
from marlinq.runtime import OPERATORS, QuantLinear, generate, load, loading, remembered, stored_operand
from marlinq.runtime.tokenizer import FileTokenizer
from tests.checkpoint.test_source import At, removed, replaced, rewritten_with_its_time_kept, truncated
from tests.testing.layouts import INTEGERS
from tests.testing.runnable_folders import (
    Quantizer,
    random_quantizer,
    random_tuple,
    replace_weight,
    save_plain,
    save_quantized,
    save_tokenizer,
)
from tests.testing.tiny_models import tiny_model

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 5, 9, 120, 3, 77, 8, 64, 31, 2, 90, 17]])

ARCHITECTURES = [
    "llama",
    "llama-tied",
    "qwen2",
    "gpt2",
    "gpt_neox",
    "falcon",
    "gemma2",
    "opt",
    "phi3",
    "bloom",
]


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# Both sides compute the same products in float32; only the order of summation differs, over at most 20
# layers of a few hundred terms, each rounding by 2**-24.
FLOAT32 = 2e-5


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("operator", ["auto", "w4a16"])
def test_logits_equal_those_of_the_dequantised_model(name: str, operator: str, tmp_path: Path) -> None:
    reference = tiny_model(name)
    tuples = save_quantized(tmp_path, reference, "gptq", random_quantizer(symmetric=False))
    loaded = load(tmp_path, device="cpu", operator=operator)
    assert set(loaded.decisions) == set(tuples)
    expected = "dense" if operator == "auto" else "w4a16"
    assert {decision.operator for decision in loaded.decisions.values()} == {expected}
    quantized = [module for module in loaded.model.modules() if isinstance(module, QuantLinear)]
    assert len(quantized) == (0 if operator == "auto" else len(tuples))
    assert relative(logits(loaded.model), logits(reference)) < FLOAT32


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "falcon"])
def test_unquantised_checkpoints_load_as_they_are(name: str, tmp_path: Path) -> None:
    reference = tiny_model(name)
    loaded = load(save_plain(tmp_path, reference), device="cpu")
    assert not loaded.decisions
    assert torch.equal(logits(loaded.model), logits(reference))


def whole_tiles(quantize: Quantizer) -> Quantizer:
    """Leaves out what Marlin can't store: here the key and value projections, with 32 columns."""
    return lambda name, weight: quantize(name, weight) if weight.shape[0] % 64 == 0 else None


def test_all_five_formats_give_identical_logits(tmp_path: Path) -> None:
    found = {}
    for layout in INTEGERS:
        folder = tmp_path / layout
        save_quantized(folder, tiny_model("llama"), layout, whole_tiles(random_quantizer()))
        for operator in ("dense", "w4a16"):
            found[layout, operator] = logits(load(folder, device="cpu", operator=operator).model)
    for operator in ("dense", "w4a16"):
        for layout in INTEGERS:
            assert torch.equal(found[layout, operator], found["gptq", operator])


@pytest.mark.parametrize("group_size", [16, 32, 64, -1])
@pytest.mark.parametrize("act_order", [False, True])
def test_group_sizes_and_activation_order(group_size: int, act_order: bool, tmp_path: Path) -> None:
    reference = tiny_model("llama")
    save_quantized(
        tmp_path, reference, "gptq-v2", random_quantizer(group_size=group_size, act_order=act_order)
    )
    loaded = load(tmp_path, device="cpu", operator="w4a16")
    operators = {decision.operator for decision in loaded.decisions.values()}
    assert operators == ({"dense"} if group_size == 16 else {"w4a16"})
    if group_size == 16:
        assert all("groups of 16" in decision.reason for decision in loaded.decisions.values())
    assert relative(logits(loaded.model), logits(reference)) < FLOAT32


def test_eight_bit_modules_run_dense_and_say_so(tmp_path: Path) -> None:
    reference = tiny_model("llama")
    save_quantized(tmp_path, reference, "gptq", random_quantizer(bits=8))
    loaded = load(tmp_path, device="cpu", operator="w4a16")
    assert all(d.operator == "dense" and "int8 weights" in d.reason for d in loaded.decisions.values())
    assert any("int8 weights" in line for line in loaded.report())
    assert relative(logits(loaded.model), logits(reference)) < FLOAT32


def test_names_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    reference = tiny_model("gpt2")
    tuples = save_quantized(tmp_path, reference, "gptq", random_quantizer(), prefix="transformer.")
    assert all(name.startswith("h.") for name in tuples)
    loaded = load(tmp_path, device="cpu")
    assert len(loaded.decisions) == len(tuples)
    assert relative(logits(loaded.model), logits(reference)) < FLOAT32


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_quantised_head(name: str, tmp_path: Path) -> None:
    reference = tiny_model(name)
    save_quantized(tmp_path, reference, "gptq", random_quantizer())
    q = random_tuple(64, 128, group_size=32, seed=99)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors.update({f"lm_head.{suffix}": tensor for suffix, tensor in INTEGERS["gptq"].pack(q).items()})
    save_file(tensors, tmp_path / "model.safetensors")
    if name == "llama-tied":
        reference.lm_head.weight = nn.Parameter(torch.empty(128, 64), requires_grad=False)
    replace_weight(reference.lm_head, q)
    loaded = load(tmp_path, device="cpu", operator="w4a16")
    assert loaded.decisions["lm_head"].operator == "w4a16"
    assert relative(logits(loaded.model), logits(reference)) < FLOAT32


def edit(folder: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def test_biases_that_a_writer_added(tmp_path: Path) -> None:
    reference = tiny_model("llama")
    save_quantized(tmp_path, reference, "gptq", random_quantizer())
    linear = reference.model.layers[0].mlp.up_proj
    linear.bias = nn.Parameter(torch.randn(128).half().float())
    edit(
        tmp_path,
        {
            "model.layers.0.mlp.up_proj.bias": linear.bias.detach().half(),
            "model.layers.0.mlp.gate_proj.bias": torch.zeros(128),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        },
    )
    loaded = load(tmp_path, device="cpu", operator="w4a16")
    assert loaded.model.model.layers[0].mlp.gate_proj.bias is None
    assert relative(logits(loaded.model), logits(reference)) < FLOAT32


def test_planted_faults_are_named(tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    pristine = (tmp_path / "model.safetensors").read_bytes()
    for changes, message in (
        ({"model.norm.weight": None}, "expected a tensor 'model.norm.weight'"),
        ({"model.layers.7.mlp.up_proj.weight": torch.zeros(2)}, "'model.layers.7.mlp.up_proj.weight'"),
        ({"model.norm.weight": torch.zeros(32)}, r"'model.norm.weight': expected shape \[64\]"),
        ({"model.layers.0.mlp.up_proj.bias": torch.zeros(32)}, r"up_proj.bias': expected shape \[128\]"),
        ({"model.layers.0.mlp.up_proj.scales": None}, "model.layers.0.mlp.up_proj: the scales"),
    ):
        edit(tmp_path, changes)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path, device="cpu")
        (tmp_path / "model.safetensors").write_bytes(pristine)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(
        CheckpointError, match=r"quantised module model.layers.2.*is no linear of LlamaForCausalLM"
    ):
        load(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    with pytest.raises(CheckpointError, match="expected K, N = "):
        load(tmp_path, device="cpu")


def test_devices_and_dtypes(tmp_path: Path) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    model.config.dtype = "bfloat16"
    save_plain(tmp_path, model)
    loaded = load(tmp_path, device="cpu")
    assert loaded.dtype == torch.float32
    assert any("float32 instead of bfloat16" in line for line in loaded.report())
    assert load(tmp_path, device="cpu", dtype="bfloat16").model.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="dtype"):
        load(tmp_path, device="cpu", dtype="int8")
    with pytest.raises(UsageError, match="device"):
        load(tmp_path, device="abacus")


@pytest.mark.parametrize("layout", INTEGERS)
def test_loaded_operands_are_those_of_tensors_read_one_by_one(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several pieces a tensor, and less ahead than a block holds.
    monkeypatch.setattr(read_ahead, "PIECE_BYTES", 512)
    monkeypatch.setattr(loading, "_HOST_AHEAD_BYTES", 20_000)
    symmetric = layout == "marlin"
    quantizer = whole_tiles(random_quantizer(symmetric=symmetric, act_order=layout.startswith("gptq")))
    save_quantized(tmp_path, tiny_model("llama"), layout, quantizer)
    loaded = load(tmp_path, device="cpu", dtype="float16", operator="w4a16")
    checkpoint = Checkpoint.open(tmp_path)
    quantized = QuantizedCheckpoint.of(checkpoint)
    assert quantized is not None
    assert set(quantized.modules) == set(loaded.decisions)
    for name in loaded.decisions:
        expected = stored_operand(quantized.stored(name), torch.float16, CPU)
        module = loaded.model.get_submodule(name)
        for key in ("words", "scales", "zeros", "order"):
            mine, theirs = getattr(module, key), getattr(expected, key)
            assert (mine is None) == (theirs is None)
            assert theirs is None or torch.equal(mine, theirs)
    for name in quantized.passthrough:
        assert torch.equal(loaded.model.get_parameter(name), checkpoint.tensor(name).half()), name


def test_tensors_of_terabytes_take_no_memory_before_they_are_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    shard = "model.safetensors"
    plans = [
        TensorPlan(info.name, info.dtype, (1 << 18, 1 << 17) if info.name.endswith("qweight") else info.shape)
        for info in Checkpoint.open(tmp_path).tensors.values()
    ]
    header, infos = encode_header(shard, plans)
    (tmp_path / shard).write_bytes(header)
    # All zeros, and no disk space.
    os.truncate(tmp_path / shard, max(info.offset + info.nbytes for info in infos))
    with pytest.raises(
        CheckpointError, match="expected K, N = 64, 64 from config.json, found 2097152, 131072"
    ):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_every_tensor_is_read_once_and_its_time_is_told(name: str, tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model(name), "gptq", random_quantizer())
    timings = load(tmp_path, device="cpu").timings
    assert timings.read_bytes == Checkpoint.open(tmp_path).nbytes
    assert 0 < timings.read_seconds < timings.total
    assert {"open", "blueprint", "linears", "other tensors"} <= set(timings.stages)
    assert "loaded in" in timings.lines()[0]


@pytest.mark.parametrize("change", [rewritten_with_its_time_kept, replaced, truncated, removed])
@pytest.mark.parametrize("step", [1, 21])
@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_a_checkpoint_that_changes_while_it_is_loaded_is_refused(
    change: Callable[[Path], None], step: int, budget: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    # With nothing read ahead, tensors are read after the change; otherwise all are read before.
    monkeypatch.setattr(loading, "_HOST_AHEAD_BYTES", budget)
    at = At(step, change, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors.*( while it was read|ends early)"):
        load(tmp_path, device="cpu", progress=at)


def test_rounded_scales_are_reported(tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    loaded = load(tmp_path, device="cpu", dtype="bfloat16")
    assert "scales stored in float16 are rounded to bfloat16" in loaded.report()


def test_tokenizer_comes_along_when_there_is_one(tmp_path: Path) -> None:
    save_plain(tmp_path, tiny_model("llama"))
    assert load(tmp_path, device="cpu").tokenizer is None
    save_tokenizer(tmp_path)
    tokenizer = load(tmp_path, device="cpu").tokenizer
    assert tokenizer.decode(tokenizer("Grüße")["input_ids"]) == "Grüße"


def test_experts_that_are_not_there_are_named(tmp_path: Path) -> None:
    save_plain(tmp_path, tiny_model("llama"))
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.(gate|experts)\S*weight"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize(("name", "recognised"), [("llama", True), ("gemma2", True), ("bloom", False)])
def test_kernels_of_a_recognised_model_that_only_decodes_are_left_to_its_decoder(
    name: str, recognised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[int] = []
    monkeypatch.setattr(
        OPERATORS["w4a16"], "compile", lambda modules, *_: compiled.append(len(list(modules)))
    )
    save_quantized(tmp_path, tiny_model(name), "gptq", random_quantizer())
    loaded = load(tmp_path, device="cpu", operator="w4a16", only_decodes=True)
    # The blueprint's twin has the anatomy of the model that was loaded.
    assert loaded.anatomy == anatomy_of(loaded.model)
    assert isinstance(loaded.anatomy, Anatomy) == recognised
    assert sum(compiled) == (0 if recognised else len(loaded.decisions))
    compiled.clear()
    whole = load(tmp_path, device="cpu", operator="w4a16")
    assert whole.anatomy is None
    assert sum(compiled) == len(loaded.decisions)


def test_a_later_start_makes_the_same_model_of_what_was_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    save_quantized(folder, tiny_model("llama"), "gptq", random_quantizer())
    save_tokenizer(folder)
    monkeypatch.setenv("MARLINQ_CACHE", str(tmp_path / "cache"))
    without = load(folder, device="cpu", only_decodes=True)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(loading, "_keeps", lambda device: True)
    first = load(folder, device="cpu", only_decodes=True)
    monkeypatch.setattr(remembered, "recognise", lambda *_: pytest.fail("recognised again"))
    later = load(folder, device="cpu", only_decodes=True)
    assert isinstance(later.tokenizer, FileTokenizer)
    assert later.anatomy == first.anatomy == without.anatomy
    texts = {generate(loaded, "typed", max_new_tokens=8).text for loaded in (without, first, later)}
    assert len(texts) == 1
    # Whoever loads a model for something else gets transformers' tokenizer.
    assert not isinstance(load(folder, device="cpu").tokenizer, FileTokenizer)


def test_saving_a_quantised_model_says_what_to_do(tmp_path: Path) -> None:
    save_quantized(tmp_path / "model", tiny_model("llama"), "gptq", random_quantizer())
    loaded = load(tmp_path / "model", device="cpu")
    with pytest.raises(UnsupportedError, match="is not saved; copy the folder, or .*`marlinq convert`"):
        loaded.model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    plain = load(save_plain(tmp_path / "plain", tiny_model("llama")), device="cpu").model
    plain.save_pretrained(tmp_path / "saved")
    again = load(tmp_path / "saved", device="cpu").model
    assert torch.equal(logits(again), logits(plain))
