"""Every family of mixtures goes the whole way: quantised, verified, converted, loaded, the same logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.operations.convert import convert
from marlinq.operations.evaluate import evaluate
from marlinq.operations.quantize import Recipe, quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.verify import verify
from marlinq.runtime import generate, load
from marlinq.runtime.packed_experts import PackedExperts
from tests.testing.mixtures import MIXTURES, Mixture, calibration_text, save_mixture

FORMATS = ("gptq-v2", "awq", "compressed-tensors")
GROUP = 32


def dense_tensors(view: QuantizedCheckpoint, mixture: Mixture) -> dict[str, Tensor]:
    """All tensors of a quantised folder under the names that transformers reads, weights dequantised.

    Where the family's files hold fused tensors, they are put together here by the layout of that family.
    """
    tensors = {name: view.checkpoint.tensor(name) for name in view.passthrough}
    weights = {module: view.load(module).dequantize() for module in view.modules}
    if mixture.fused:
        for layer in sorted({name.split(".experts.")[0] for name in weights if ".experts." in name}):
            each = [
                [weights.pop(f"{layer}.experts.{expert}.{part}") for part in mixture.parts]
                for expert in range(4)
            ]
            gates, ups, downs = (torch.stack(parts) for parts in zip(*each, strict=True))
            both = torch.cat((gates, ups), dim=1)
            if mixture.model_type == "granitemoe":
                tensors[f"{layer}.input_linear.weight"] = both
                tensors[f"{layer}.output_linear.weight"] = downs
                continue
            if mixture.model_type == "gpt_oss":
                both = torch.stack((gates, ups), dim=2).flatten(1, 2)
            tensors[f"{layer}.experts.gate_up_proj"] = both.transpose(1, 2).contiguous()
            tensors[f"{layer}.experts.down_proj"] = downs.transpose(1, 2).contiguous()
    return tensors | {f"{module}.weight": weight for module, weight in weights.items()}


def reference(folder: Path, into: Path, mixture: Mixture) -> PreTrainedModel:
    """transformers' own model of the dequantised weights, in float32."""
    view = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert view is not None
    into.mkdir()
    save_file(dense_tensors(view, mixture), into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32).eval()


def matrices(model: PreTrainedModel, mixture: Mixture) -> dict[tuple[int, str], Tensor]:
    """Every expert's matrices [N, K] in the last layer of the original, taken from memory by hand."""
    layer = model.model.layers[-1]
    owner = next(
        getattr(layer, n) for n in ("mlp", "feed_forward", "block_sparse_moe", "mixer") if hasattr(layer, n)
    )
    experts = owner.experts
    found = {}
    for expert in range(4):
        down = experts.down_proj[expert].float()
        if len(mixture.parts) == 2:
            parts = (experts.up_proj[expert].float(), down)
        else:
            both = experts.gate_up_proj[expert].float()
            if mixture.model_type in ("llama4_text", "gpt_oss"):
                both, down = both.t(), down.t()
            if mixture.model_type == "gpt_oss":
                parts = (both[0::2], both[1::2], down)
            else:
                parts = (both[:32], both[32:], down)
        found |= {(expert, name): part for name, part in zip(mixture.parts, parts, strict=True)}
    return found


# One family for each way of naming and storing experts; others repeat one of them.
COMPARED = ("mixtral", "qwen3.5-moe", "deepseek-v3", "llama-4", "gpt-oss", "granite-moe", "nemotron-h")


def one_format_each() -> list[Any]:
    """Every family with one format, formats in turn, slow where it repeats another's names; and with all
    formats, which is slow."""
    turns = [
        pytest.param(name, (FORMATS[i % len(FORMATS)],), marks=[] if name in COMPARED else pytest.mark.slow)
        for i, name in enumerate(MIXTURES)
    ]
    return turns + [pytest.param(name, FORMATS, marks=pytest.mark.slow) for name in MIXTURES]


@pytest.mark.parametrize(("name", "formats"), one_format_each())
def test_a_mixture_is_quantised_verified_and_loaded(
    name: str, formats: tuple[str, ...], tmp_path: Path
) -> None:
    mixture = MIXTURES[name]
    original = save_mixture(tmp_path / "model", name)
    text = calibration_text(tmp_path)
    recipe = Recipe(group_size=GROUP, calibration=str(text), samples=8, max_length=64, expert_tokens=64)
    report = quantize(tmp_path / "model", tmp_path / "gptq", recipe=recipe, device="cpu")
    checks = verify(tmp_path / "gptq", against=tmp_path / "model", device="cpu").checks
    assert [c for c in checks if c.status in ("failed", "warning")] == []

    # Names: the family's own, every expert, nothing else of the router.
    stored = {f"{mixture.experts}.{e}.{part}" for e in range(4) for part in mixture.parts}
    assert stored <= report.modules.keys()
    assert mixture.router not in report.modules
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())["quantization_config"]
    assert "modules_in_block_to_quantize" not in config

    # Every expert's weights are nearest to the original's matrix of that expert and part.
    view = QuantizedCheckpoint.of(Checkpoint.open(tmp_path / "gptq"))
    assert view is not None
    wanted = matrices(original, mixture)
    for (expert, part), weight in wanted.items():
        mine = view.load(f"{mixture.experts}.{expert}.{part}").dequantize()
        distances = {
            key: float((mine - other).norm() / weight.norm())
            for key, other in wanted.items()
            if other.shape == mine.shape
        }
        assert min(distances, key=lambda key: distances[key]) == (expert, part)
        # Four bits leave about a tenth; unrelated matrices are sqrt(2) apart.
        assert distances.pop((expert, part)) < 0.25
        assert min(distances.values()) > 1

    # Source bytes of what is not quantised.
    source = Checkpoint.open(tmp_path / "model")
    for tensor in view.passthrough:
        assert torch.equal(
            view.checkpoint.tensor(tensor).view(torch.uint8), source.tensor(tensor).view(torch.uint8)
        )

    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(5))
    dense = reference(tmp_path / "gptq", tmp_path / "dense", mixture)
    with torch.no_grad():
        theirs = dense(ids).logits
    for target in ("gptq", *formats):
        folder = tmp_path / target
        if target != "gptq":
            convert(tmp_path / "gptq", folder, target_format=target)
        loaded = load(folder, device="cpu", dtype="float32")
        packed = [m for m in loaded.model.modules() if isinstance(m, PackedExperts)]
        assert packed
        assert all(parameter.dim() < 3 or "conv" in key for key, parameter in loaded.model.named_parameters())
        with torch.no_grad():
            ours = loaded.model(ids).logits
        # float32 products in another order, through two blocks.
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-4, target


@pytest.mark.parametrize("name", ["mixtral", "qwen3.5-moe"])
def test_files_with_fused_experts_give_the_same_output(name: str, tmp_path: Path) -> None:
    save_mixture(tmp_path / "split", name)
    save_mixture(tmp_path / "fused", name, fused=True)
    recipe = Recipe(group_size=GROUP, method="rtn")
    outputs = []
    for kind in ("split", "fused"):
        quantize(tmp_path / kind, tmp_path / f"{kind}-int4", recipe=recipe, device="cpu")
        outputs.append(load_file(tmp_path / f"{kind}-int4" / "model.safetensors"))
    split = {key.replace("block_sparse_moe", "mlp"): value for key, value in outputs[0].items()}
    assert split.keys() == outputs[1].keys()
    assert all(torch.equal(value, outputs[1][key]) for key, value in split.items())


def test_marlin_words_of_experts(tmp_path: Path) -> None:
    """Shapes that Marlin holds: every format, and its own files."""
    save_mixture(tmp_path / "model", "qwen3-moe", moe_intermediate_size=64, num_key_value_heads=4)
    recipe = Recipe(format="marlin", group_size=64, method="rtn")
    quantize(tmp_path / "model", tmp_path / "marlin", recipe=recipe, device="cpu")
    checks = verify(tmp_path / "marlin", against=tmp_path / "model", device="cpu").checks
    assert [c for c in checks if c.status in ("failed", "warning")] == []
    convert(tmp_path / "marlin", tmp_path / "gptq", target_format="gptq")
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        logits = [
            load(tmp_path / kind, device="cpu", dtype="float32").model(ids).logits
            for kind in ("marlin", "gptq")
        ]
    # The same codes and scales; only the words' order differs.
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)


def test_extra_layers_are_carried_and_named(tmp_path: Path) -> None:
    """DeepSeek-V3 files hold a layer for multi-token prediction that the model's forward does not run."""
    model = save_mixture(tmp_path / "model", "deepseek-v3")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    extra = {
        "model.layers.61.eh_proj.weight": torch.randn(64, 128).bfloat16(),
        "model.layers.61.mlp.experts.0.up_proj.weight": torch.randn(32, 64).bfloat16(),
        "model.layers.61.enorm.weight": torch.randn(64).bfloat16(),
    }
    save_file(tensors | extra, path, metadata={"format": "pt"})
    assert any("layers" in pattern for pattern in model._keys_to_ignore_on_load_unexpected)
    recipe = Recipe(format="compressed-tensors", group_size=GROUP, method="rtn")
    report = quantize(tmp_path / "model", tmp_path / "out", recipe=recipe, device="cpu")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[key], value) for key, value in extra.items())
    assert "does not run it" in report.kept["model.layers.61.eh_proj"].reason
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert {"model.layers.61.eh_proj", "model.layers.61.mlp.experts.0.up_proj"} <= set(config["ignore"])
    assert {"model.layers.1.mlp.gate", "lm_head"} <= set(config["ignore"])
    load(tmp_path / "out", device="cpu")


def test_a_kept_layer_of_experts_is_loaded_dense(tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", "qwen3-moe")
    for form, fused in (("awq", False), ("gptq", True), ("compressed-tensors", True)):
        source = tmp_path / f"model-{form}"
        save_mixture(source, "qwen3-moe", fused=fused)
        recipe = Recipe(format=form, group_size=GROUP, method="rtn", symmetric=form != "awq").replace(
            overrides=(Override(r"layers\.0\.mlp\.experts", skip=True),)
        )
        quantize(source, tmp_path / form, recipe=recipe, device="cpu")
        checks = verify(tmp_path / form, against=source, device="cpu").checks
        assert [(c.name, c.detail) for c in checks if c.status in ("failed", "warning")] == []
        loaded = load(tmp_path / form, device="cpu", dtype="float32")
        kinds = [isinstance(layer.mlp.experts, PackedExperts) for layer in loaded.model.model.layers]
        assert kinds == [False, True]
        shutil.rmtree(source)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next"])
def test_a_mixture_writes_its_text_and_generates(name: str, tmp_path: Path) -> None:
    """Calibration that the model writes itself, evaluation and generation run on mixtures too."""
    save_mixture(tmp_path / "model", name)
    recipe = Recipe(group_size=GROUP, samples=4, max_length=24)
    report = quantize(tmp_path / "model", tmp_path / "int4", recipe=recipe, device="cpu")
    assert report.calibration is not None
    assert report.calibration["source"] == "self"
    text = calibration_text(tmp_path)
    found = evaluate(
        tmp_path / "int4", against=tmp_path / "model", text=str(text), windows=2, length=32, device="cpu"
    )
    assert found.kl is not None
    assert 0 < found.kl < 2
    loaded = load(tmp_path / "int4", device="cpu", dtype="float32")
    written = list(generate(loaded, "The quick", max_new_tokens=6).tokens)
    ids = loaded.tokenizer("The quick", return_tensors="pt").input_ids
    with torch.no_grad():
        wanted = loaded.model.generate(ids, max_new_tokens=6, do_sample=False)
    assert written == wanted[0, ids.shape[1] :].tolist()[: len(written)]
    assert written
