"""Models of transformers' from_pretrained are those of marlinq.load, whatever transformers does with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
    pipeline,
)
from transformers.generation import CompileConfig

from marlinq.core.errors import CheckpointError, UnsupportedError, UsageError
from marlinq.integrations.transformers import register
from marlinq.integrations.transformers.quantizer import MarlinqConfig, MarlinqQuantizer
from marlinq.runtime import QuantLinear, load
from tests.integrations.folders import model, saved
from tests.testing.layouts import INTEGERS
from tests.testing.pairs import in_turn
from tests.testing.runnable_folders import random_tuple, save_plain, save_tokenizer

IDS = torch.tensor([[1, 9, 30, 77, 250, 3]])
NEW_TOKENS = 24
# Llama has neither biases nor ties, Qwen2 has biases, Gemma a tied head, GPT-2 transposed weights and a block
# that initialises its linears itself.
NAMES = ["llama", "qwen2", "gemma", "gpt2"]

# The same float32 sums in another order, over at most 20 layers of a few hundred terms of 2**-24 each.
FLOAT32 = 2e-5


def logits(found: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return found(input_ids=IDS).logits


def greedy(found: PreTrainedModel, **options: Any) -> Tensor:
    return found.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


# A model is the same whatever layout its words come from: each name runs every time, and each layout.
@pytest.mark.parametrize(
    ("name", "stored"),
    in_turn(NAMES, [*((layout, "float32") for layout in INTEGERS), ("marlin", "bfloat16")]),
)
def test_logits_and_text_are_those_of_load(name: str, stored: tuple[str, str], tmp_path: Path) -> None:
    layout, dtype = stored
    folder = saved(tmp_path, name, layout)
    expected = load(folder, device="cpu", dtype=dtype)
    found, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map="cpu", output_loading_info=True
    )
    assert not any(info.values()), info
    assert (found.dtype, found.device.type, found.training) == (getattr(torch, dtype), "cpu", False)
    assert torch.equal(logits(found), logits(expected.model))
    assert found.hf_quantizer.decisions == expected.decisions
    tokens = greedy(found)
    assert tokens.shape == (1, IDS.shape[1] + NEW_TOKENS)
    assert torch.equal(tokens, greedy(expected.model))
    static = {"cache_implementation": "static"}
    assert torch.equal(greedy(found, **static), greedy(expected.model, **static))


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_compiles_as_one_graph(name: str, tmp_path: Path) -> None:
    """With the packed operator, whose fake kernel has to be right; aot_eager changes no arithmetic."""
    folder = saved(tmp_path, name, blocks=1, symmetric=False, act_order=True)
    register(operator="w4a16")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    packed = [module for module in found.modules() if isinstance(module, QuantLinear)]
    assert len(packed) == len(found.hf_quantizer.decisions) > 0
    torch.compiler.reset()
    with torch.no_grad():
        compiled = torch.compile(found, fullgraph=True, backend="aot_eager")(input_ids=IDS).logits
    assert torch.equal(compiled, logits(found))
    # generate compiles so by itself with a static cache on a GPU.
    step = CompileConfig(fullgraph=True, mode=None, backend="aot_eager")
    step._compile_all_devices = True
    static = {"cache_implementation": "static"}
    expected = greedy(found, **static)
    torch.compiler.reset()
    assert torch.equal(greedy(found, compile_config=step, **static), expected)
    assert hasattr(found, "_compiled_call")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::torch")  # inductor uses what torch deprecates
@pytest.mark.parametrize("operator", ["auto", "w4a16"])
def test_compiles_with_inductor(operator: str, tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler, which inductor needs on a CPU")
    register(operator=operator)
    folder = saved(tmp_path, "qwen2")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    expected = logits(found)
    torch.compiler.reset()
    difference = logits(torch.compile(found, fullgraph=True)) - expected
    assert float(difference.norm() / expected.norm()) < FLOAT32


def test_pipeline(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", "marlin")
    tokenizer = save_tokenizer(folder)
    answer = pipeline("text-generation", model=str(folder), device_map="cpu", dtype=torch.float32)
    assert isinstance(answer.model.hf_quantizer, MarlinqQuantizer)
    options = {"max_new_tokens": 12, "max_length": None, "do_sample": False, "return_full_text": False}
    found = answer("Hello", clean_up_tokenization_spaces=False, **options)[0]["generated_text"]
    ids = tokenizer("Hello", return_tensors="pt")["input_ids"]
    reference = load(folder, device="cpu", dtype="float32").model
    tokens = reference.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert found == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_quantised_head(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, name)
    q = random_tuple(64, 320, group_size=32, seed=99)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in INTEGERS["gptq"].pack(q).items()}
    save_file(tensors, folder / "model.safetensors")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
    assert "lm_head" in found.hf_quantizer.decisions
    assert torch.equal(logits(found), logits(load(folder, device="cpu", dtype="float32").model))
    # A call of transformers that ties heads must not touch this one.
    before = logits(found)
    found.tie_weights()
    assert torch.equal(logits(found), before)


def test_dtype_and_device_are_those_of_transformers(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    where: list[Any] = ["cpu", {"": "cpu"}, torch.device("cpu")]
    if not torch.cuda.is_available():
        where += [None, "auto"]
    for device_map in where:
        found = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map)
        assert {tensor.dtype for tensor in found.state_dict().values()} == {torch.bfloat16}
        assert {tensor.device.type for tensor in [*found.parameters(), *found.buffers()]} == {"cpu"}


def test_the_loaded_model_describes_its_quantization(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama", "awq", symmetric=False)
    found = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert found.config.to_dict()["quantization_config"] == stored
    assert stored["quant_method"] == "awq"
    assert (found.is_quantized, found.quantization_method) == (True, "marlinq")
    quantizer = found.hf_quantizer
    assert (quantizer.is_trainable, quantizer.is_compileable, quantizer.path) == (False, True, folder)
    assert quantizer.report()[0].startswith("21 quantised linears: ")
    rounded = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.bfloat16)
    assert rounded.hf_quantizer.report()[-1] == "scales stored in float16 are rounded to bfloat16"


def test_saving_is_refused(tmp_path: Path) -> None:
    found = AutoModelForCausalLM.from_pretrained(saved(tmp_path / "in", "llama"), device_map="cpu")
    with (
        pytest.warns(UserWarning, match="copy the folder, or write another format with `marlinq convert`"),
        pytest.raises(ValueError, match="quantized with marlinq and is not serializable"),
    ):
        found.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refusals_are_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "llama")
    own = r"after marlinq\.unregister\(\) transformers' own quantizer loads it"
    from_pretrained = AutoModelForCausalLM.from_pretrained
    with pytest.raises(UnsupportedError, match="device_map: expected one device .* found cpu, cuda:1"):
        from_pretrained(folder, device_map={"model": "cpu", "lm_head": 1})
    with pytest.raises(UsageError, match="operator: expected auto, "):
        register(operator="abacus")
    with pytest.raises(UsageError, match="dtype: expected float16, bfloat16 or float32"):
        from_pretrained(folder, device_map="cpu", dtype=torch.float64)
    with pytest.raises(UnsupportedError, match=f"LlamaModel: .* use AutoModelForCausalLM; .*{own}"):
        AutoModel.from_pretrained(folder, device_map="cpu")
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UnsupportedError, match="state_dict: marlinq loads quantised weights from a folder"):
        LlamaForCausalLM.from_pretrained(None, config=config, state_dict={}, device_map="cpu")
    config.distributed_config = {"tp_size": 2}
    with pytest.raises(UnsupportedError, match="distributed_config: marlinq keeps a model on one device"):
        from_pretrained(folder, config=config, device_map="cpu")
    plain = save_plain(tmp_path / "plain", model("llama"))
    with pytest.raises(UsageError, match="expected a folder that is quantised already"):
        from_pretrained(plain, quantization_config=MarlinqConfig())
    shutil.copy(folder / "model.safetensors", folder / "model.fp16.safetensors")
    with pytest.raises(UnsupportedError, match=r"found model\.fp16\.safetensors; load without variant"):
        from_pretrained(folder, device_map="cpu", variant="fp16")


def test_no_pickle_is_opened(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin: expected safetensors files"):
        AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")


def test_every_tensor_has_its_place_before_one_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    missing = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected a tensor 'model.norm.weight'"):
        AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")
    extra = {"model.norm.weight": missing, "model.layers.7.mlp.up_proj.weight": missing.clone()}
    save_file({**tensors, **extra}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model.layers.7.mlp.up_proj.weight'"):
        AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj .* is no linear of MixtralForCausalLM"):
        AutoModelForCausalLM.from_pretrained(folder, device_map="cpu")


def test_a_config_that_says_encoder_decoder_is_refused_as_load_does(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps({**config, "is_encoder_decoder": True}))
    for open_folder in (load, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(UnsupportedError, match="llama is an encoder-decoder"):
            open_folder(folder)
