"""A DeepSeek-V4 folder as a whole: FP8 blocks and FP4 experts with E8M0 scales, under that family's names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV4Config

from marlinq.operations.convert import convert
from marlinq.operations.inspect import inspect
from marlinq.operations.quantize import Recipe, quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.verify import verify
from marlinq.runtime import generate, load
from tests.testing.faults import one_up, passes, planted
from tests.testing.runnable_folders import save_tokenizer
from tests.testing.whole_models import assert_same_bytes, logits, tensors_of

EXPERT, SHARED = "model.layers.1.ffn.experts.2.w1", "model.layers.0.ffn.shared_experts.w2"
TWO_BLOCKS = "model.layers.0.attn.wq_a"
CPU: dict[str, Any] = {"device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``original`` and ``v4``, which is quantised from it. Matrices have whole blocks, for transformers."""
    folder = tmp_path_factory.mktemp("deepseek-v4")
    config = DeepseekV4Config(
        vocab_size=288,
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["hash_moe", "moe"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        q_lora_rank=128,
        o_lora_rank=128,
        o_groups=1,
        index_n_heads=2,
        index_head_dim=128,
        index_topk=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." in name:
                # Experts of random weights have one exponent; those of trained ones don't.
                weight[..., : weight.shape[-1] // 2] *= 2
    model.save_pretrained(folder / "original")
    save_tokenizer(folder / "original")
    experts = (Override(r"\.experts\.", settings={"scheme": "mxfp4"}),)
    recipe = Recipe(method="rtn", scheme="fp8-block", format="deepseek-v4", overrides=experts)
    quantize(folder / "original", folder / "v4", recipe=recipe, **CPU)
    return folder


def test_names_and_types_are_the_family_s_and_transformers_reads_them(root: Path, tmp_path: Path) -> None:
    stored = tensors_of(root / "v4")
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    assert kinds[f"{EXPERT}.weight"] == (torch.int8, (128, 128))
    assert kinds[f"{EXPERT}.scale"] == (torch.float8_e8m0fnu, (128, 8))
    assert kinds[f"{TWO_BLOCKS}.weight"] == (torch.float8_e4m3fn, (128, 256))
    assert kinds[f"{TWO_BLOCKS}.scale"] == (torch.float8_e8m0fnu, (1, 2))
    assert not any(name.endswith("weight_scale_inv") for name in stored)
    config = json.loads((root / "v4" / "config.json").read_text())["quantization_config"]
    assert (config["expert_dtype"], config["scale_fmt"]) == ("fp4", "ue8m0")
    # bfloat16 holds every E4M3 and E2M1 value times a power of two.
    convert(root / "v4", tmp_path / "dense", target_format="dense", progress=False)
    theirs, dense = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        for folder in (root / "v4", tmp_path / "dense")
    )
    assert torch.equal(logits(theirs), logits(dense))


def test_every_command_takes_it(root: Path, tmp_path: Path) -> None:
    seen = inspect(root / "v4", progress=False)
    assert seen.format == "deepseek-v4"
    assert {each.server: each.loads for each in seen.servers}["transformers"]
    checked = verify(root / "v4", against=root / "original", **CPU)
    assert [check for check in checked.checks if check.status in ("failed", "warning")] == []
    loaded = load(root / "v4", device="cpu", progress=False)
    assert len(generate(loaded, "It is", max_new_tokens=2).tokens) == 2
    recipe = Recipe(method="rtn", scheme="int8", format="compressed-tensors", group_size=32)
    with pytest.warns(UserWarning, match="quantised already"):
        quantize(root / "v4", tmp_path / "int8", recipe=recipe, **CPU)
    convert(root / "v4", tmp_path / "ct", target_format="compressed-tensors", progress=False)
    convert(tmp_path / "ct", tmp_path / "back", target_format="deepseek-v4", progress=False)
    assert_same_bytes(root / "v4", tmp_path / "back")


def test_releases_say_the_experts_dtype_beside_the_quantisation(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "v4", tmp_path / "release")
    config = json.loads((root / "v4" / "config.json").read_text())
    config["expert_dtype"] = config["quantization_config"].pop("expert_dtype")
    (tmp_path / "release" / "config.json").write_text(json.dumps(config))
    assert inspect(tmp_path / "release", progress=False).format == "deepseek-v4"
    convert(tmp_path / "release", tmp_path / "ct", target_format="compressed-tensors", progress=False)
    assert "expert_dtype" not in json.loads((tmp_path / "ct" / "config.json").read_text())


def of_scales(module: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    """A fault of the exponents' bytes."""

    def plant(tensors: dict[str, Tensor]) -> None:
        name = f"{module}.scale"
        tensors[name] = change(tensors[name].view(torch.uint8)).contiguous().view(torch.float8_e8m0fnu)

    return plant


def of_codes(module: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    def plant(tensors: dict[str, Tensor]) -> None:
        name = f"{module}.weight"
        dtype = tensors[name].dtype
        tensors[name] = change(tensors[name].view(torch.uint8)).contiguous().view(dtype)

    return plant


def one_bit(codes: Tensor) -> Tensor:
    flat = codes.flatten().clone()
    flat[int((flat & 0x7).argmax())] ^= 0x08
    return flat.reshape(codes.shape)


FAULTS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "scale of an expert missing": lambda tensors: tensors.pop(f"{EXPERT}.scale"),
    "scale of a block missing": lambda tensors: tensors.pop(f"{TWO_BLOCKS}.scale"),
    "exponents of an expert off": of_scales(EXPERT, lambda scales: scales + 1),
    "exponents of an expert turned over": of_scales(EXPERT, lambda scales: 254 - scales),
    "exponents of an expert transposed": of_scales(EXPERT, lambda x: x.t().reshape(x.shape)),
    "one exponent up": of_scales(EXPERT, one_up),
    "exponents of blocks turned over": of_scales(TWO_BLOCKS, lambda scales: 254 - scales),
    "a block's exponent is NaN": of_scales(TWO_BLOCKS, lambda x: x.index_fill(1, torch.tensor(1), 255)),
    "last block missing": of_scales(TWO_BLOCKS, lambda scales: scales[:, :-1]),
    "nibbles exchanged": of_codes(EXPERT, lambda codes: (codes << 4) | (codes >> 4)),
    "FP4 as FP8": lambda tensors: tensors.update(
        {f"{EXPERT}.weight": tensors[f"{EXPERT}.weight"].view(torch.float8_e4m3fn)}
    ),
    "one bit of FP4": of_codes(EXPERT, one_bit),
    "one bit of FP8": of_codes(SHARED, one_bit),
    "two experts exchanged": lambda tensors: tensors.update(
        {f"{EXPERT}.weight": tensors[f"{EXPERT}.weight".replace("experts.2", "experts.3")].clone()}
    ),
}  # fmt: skip


QUICK = ("scale of a block missing", "exponents of an expert off", "last block missing", "one bit of FP4")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_planted_faults_are_found(root: Path, tmp_path: Path, name: str) -> None:
    faulty = planted(root / "v4", tmp_path / "faulty", FAULTS[name])
    assert not passes(faulty, root / "original")


def test_groups_have_names_of_the_model_too(root: Path, tmp_path: Path) -> None:
    """Transformers looks targets up by the names of the model, servers by those of files."""
    experts = (Override(r"\.experts\.", settings={"scheme": "mxfp4"}),)
    recipe = Recipe(method="rtn", scheme="fp8-dynamic", format="compressed-tensors", overrides=experts)
    quantize(root / "original", tmp_path / "out", recipe=recipe, **CPU)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    patterns = {
        group["weights"]["num_bits"]: [each[3:] for each in group["targets"] if each.startswith("re:")]
        for group in config["config_groups"].values()
    }
    for names in (
        ("attn.wq_a", "self_attn.q_a_proj"),
        ("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"),
    ):
        for name in names:
            assert any(re.match(each, f"model.layers.0.{name}") for each in patterns[8])
    first = next(iter(config["config_groups"].values()))
    assert first["weights"]["num_bits"] == 4
