from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from marlinq.checkpoint import CheckpointWriter
from marlinq.core.errors import CheckpointError, NumericsError, OutputError, UnsupportedError
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.rotate import rotate
from marlinq.operations.rotate.rotation import rotation_matrix
from marlinq.operations.verify import verify
from tests.testing.faults import flipped
from tests.testing.mixtures import save_mixture
from tests.testing.original_folders import READ, RECIPE, folder_bytes, save_tiny
from tests.testing.tiny_models import tiny_model

LIKE_LLAMA = ("llama", "llama-tied", "mistral", "qwen2", "qwen3")


def logits(folder: Path) -> torch.Tensor:
    """In float64, of 24 tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double().eval()
    ids = torch.arange(24)[None] * 5 % 128
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.parametrize("size", [1, 8, 20, 64, 576, 45])
def test_the_rotation_is_orthogonal_and_spreads_every_channel(size: int) -> None:
    turn = rotation_matrix(size, 3)
    torch.testing.assert_close(turn @ turn.t(), torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-13)
    two = size & -size
    # Each entry is one of the odd part's, at most 1, over the root of the power of two.
    assert float(turn.abs().max()) <= two**-0.5 + 1e-13
    assert torch.equal(turn, rotation_matrix(size, 3))
    assert size == 1 or not torch.equal(turn, rotation_matrix(size, 4))


@pytest.mark.parametrize("name", LIKE_LLAMA)
def test_the_rotated_model_computes_the_same(tmp_path: Path, name: str) -> None:
    source = save_tiny(name, tmp_path / "model")
    report = rotate(source, tmp_path / "out", device="cpu")
    expected, found = logits(source), logits(tmp_path / "out")
    # Weights are rounded to float32 twice, by the product and when stored, to 2**-24 of a row's norm over the
    # root of its length each: the square root of 64 terms, three layers deep, makes up to 1e-6.
    assert float((found - expected).norm() / expected.norm()) < 2e-6
    assert max(report.block_error, report.logits_error) < 2e-6
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    tied = name == "llama-tied"
    assert report.untied == tied
    assert set(after) - set(before) == ({"lm_head.weight"} if tied else set())
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        if "q_norm" in key or "k_norm" in key or key.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
            assert torch.equal(after[key], tensor), key
        elif key.endswith("norm.weight"):
            assert bool((after[key] == 1).all()), key
            assert not bool((tensor == 1).all())
        else:
            assert not torch.allclose(after[key], tensor), key
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    manifest = json.loads((tmp_path / "out" / "marlinq.json").read_text())
    assert (manifest["operation"], manifest["seed"]) == ("rotate", 0)
    assert (report.rotated, report.carried) == (
        sum(not key.endswith("norm.weight") for key in after) - report.carried + _normed(after),
        _normed(after) + sum(key.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")) for key in after),
    )
    assert report.folded == sum(key.endswith("norm.weight") for key in after) - _normed(after)


def _normed(tensors: dict[str, torch.Tensor]) -> int:
    """Norms of heads, which the stream never meets."""
    return sum("q_norm" in key or "k_norm" in key for key in tensors)


@pytest.mark.parametrize("name", ["cohere", "gemma", "gemma3", "gpt2", "olmo2", "phi3", "stablelm"])
def test_other_models_are_refused(tmp_path: Path, name: str) -> None:
    source = save_tiny(name, tmp_path / "model")
    kind = NumericsError if name == "gemma" else UnsupportedError
    with pytest.raises(kind, match=r"quantise it as it is") as caught:
        rotate(source, tmp_path / "out", device="cpu")
    assert "\n" not in str(caught.value)
    assert str(source) in str(caught.value)
    assert not list(tmp_path.glob("out*"))


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", "mixtral")
    with pytest.raises(UnsupportedError, match="MixtralForCausalLM has"):
        rotate(tmp_path / "model", tmp_path / "out", device="cpu")


def test_quantised_sources_are_refused(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    quantize(source, tmp_path / "int4", recipe=RECIPE.replace(method="rtn"), device="cpu")
    with pytest.raises(UnsupportedError, match="rotate the original"):
        rotate(tmp_path / "int4", tmp_path / "out", device="cpu")


def test_weights_out_of_range_are_reported(tmp_path: Path) -> None:
    model = tiny_model("llama").half()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight.fill_(3e4)
        model.model.layers[1].self_attn.v_proj.weight.fill_(8.0)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(
        NumericsError, match=r"layers\.1\.self_attn\.v_proj\.weight, rotated, is not finite in"
    ):
        rotate(tmp_path / "model", tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", [torch.ones(64, 32), torch.ones(64, 128, dtype=torch.int8)])
def test_a_tensor_of_another_shape_or_type_is_told(tmp_path: Path, wrong: torch.Tensor) -> None:
    source = save_tiny("llama", tmp_path / "model")
    path = source / "model.safetensors"
    # Not of the block that is run both ways.
    name = "model.layers.2.mlp.down_proj.weight"
    save_file({**load_file(path), name: wrong}, path)
    with pytest.raises(CheckpointError, match=rf"{name}: expected floating point \[64, 128\], found"):
        rotate(source, tmp_path / "out", device="cpu")
    assert not list(tmp_path.glob("out*"))


def test_an_interrupted_run_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny("llama-tied", tmp_path / "model")
    rotate(source, tmp_path / "whole", device="cpu", seed=5)
    write = CheckpointWriter.write

    def stops(self: CheckpointWriter, name: str, tensor: torch.Tensor) -> None:
        if len(self.written) > 6:
            raise KeyboardInterrupt
        write(self, name, tensor)
        self.commit()

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "write", stops)
        with pytest.raises(KeyboardInterrupt):
            rotate(source, tmp_path / "out", device="cpu", seed=5)
    assert not (tmp_path / "out").exists()
    shutil.copytree(tmp_path / "out.partial", tmp_path / "damaged.partial")
    shard = tmp_path / "damaged.partial" / "model.safetensors"
    with shard.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        places = json.loads(file.read(header - 8))
    journal = (tmp_path / "damaged.partial" / "journal.jsonl").read_text()
    name = next(name for name in places if f'"{name}"' in journal)
    says = f"tensor {name} was changed since it was written"
    with flipped(shard, header + places[name]["data_offsets"][0]), pytest.raises(CheckpointError, match=says):
        rotate(source, tmp_path / "damaged", device="cpu", seed=5)
    assert not (tmp_path / "damaged").exists()
    steps: list[tuple[Any, ...]] = []
    report = rotate(source, tmp_path / "out", device="cpu", seed=5, progress=lambda *step: steps.append(step))
    assert report.resumed == 7
    assert "continued" in report.render()
    assert steps[-1][0] == "rotating"
    assert steps[-1][1] == steps[-1][2]
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")
    with pytest.raises(OutputError, match="already exists"):
        rotate(source, tmp_path / "out", device="cpu")


def test_a_tied_head_that_is_stored_as_well_is_rotated_once(tmp_path: Path) -> None:
    source = save_tiny("llama-tied", tmp_path / "model")
    rotate(source, tmp_path / "plain", device="cpu")
    path = source / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    rotate(source, tmp_path / "out", device="cpu")
    plain, out = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "out"))
    assert plain.keys() == out.keys()
    assert all(torch.equal(plain[name], out[name]) for name in plain)


@pytest.mark.parametrize(("method", "warns"), [("rtn", True), ("imatrix", True), ("gptq", False)])
def test_methods_that_lose_by_a_rotation_say_so(tmp_path: Path, method: str, warns: bool) -> None:
    source = save_tiny("llama", tmp_path / "model")
    rotate(source, tmp_path / "rotated", device="cpu")
    recipe = Recipe(method=method, group_size=32, samples=8, max_length=40)
    said = f"rotated, which makes {method} worse"
    expected = pytest.warns(UserWarning, match=said) if warns else nullcontext()
    with expected:
        quantize(tmp_path / "rotated", tmp_path / "out", recipe=recipe, device="cpu")


def test_a_rotated_model_is_quantised_and_verified(tmp_path: Path) -> None:
    source = save_tiny("llama-tied", tmp_path / "model")
    rotated = tmp_path / "rotated"
    rotate(source, rotated, device="cpu")
    quantize(rotated, tmp_path / "int4", recipe=READ, device="cpu")
    assert verify(tmp_path / "int4", against=rotated).ok
    # The weights of the original are others.
    assert not verify(tmp_path / "int4", against=source).ok
