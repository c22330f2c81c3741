"""Every ordered pair of layouts: the same tuples, the same bytes after the way back, or the right refusal."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from marlinq.core.errors import ConversionRefused
from marlinq.core.granularity import Granularity
from marlinq.operations.convert import convert
from tests.testing.layouts import INTEGERS
from tests.testing.pairs import every_pair
from tests.testing.quantized_folders import (
    CONFIG,
    SIDE_FILES,
    all_tensors,
    assert_holds,
    assert_same_tensors,
    model_tuples,
    opened,
    plain_tensors,
    write,
)

PAIRS = list(permutations(INTEGERS, 2))
KINDS: dict[str, dict[str, Any]] = {
    "symmetric 32": {"group_size": 32},
    "symmetric 64": {"group_size": 64},
    "symmetric 128": {"group_size": 128},
    "symmetric channelwise": {"group_size": -1},
    "symmetric 32, lm_head": {"group_size": 32, "lm_head": True},
    "asymmetric 32": {"group_size": 32, "zeros": "one-up"},
    "asymmetric channelwise": {"group_size": -1, "zeros": "one-up"},
    "asymmetric with zeros of 0": {"group_size": 64, "zeros": "any"},
    "activation order": {"group_size": 32, "scattered": True},
    "8 bits": {"group_size": 32, "bits": 8},
}


def reason(layout: str, kind: dict[str, Any]) -> str | None:
    """The matrix of the five layouts: a part of the refusal, or None where the layout holds the kind."""
    if kind.get("bits") == 8 and layout in ("awq", "marlin"):
        return "int8 weights"
    if layout == "marlin" and "zeros" in kind:
        return "asymmetric"
    if "scattered" in kind and layout not in ("gptq", "gptq-v2"):
        return "activation order"
    if layout == "gptq" and kind.get("zeros") == "any":
        return "a zero point of 0"
    return None


@pytest.mark.parametrize(
    ("source", "target", "kind"), every_pair([(*pair, kind) for kind in KINDS for pair in PAIRS])
)
def test_every_pair_of_formats_converts_there_and_back(
    tmp_path: Path, source: str, target: str, kind: str
) -> None:
    if reason(source, KINDS[kind]) is not None:
        return
    modules = model_tuples(**KINDS[kind])
    before = write(tmp_path / "before", source, modules)
    there, back = tmp_path / "there", tmp_path / "back"
    refused = reason(target, KINDS[kind])
    if refused is not None:
        with pytest.raises(ConversionRefused, match=refused) as caught:
            convert(before, there, target_format=target)
        assert "model.layers.0." in str(caught.value)
        assert "\n" not in str(caught.value)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["before"]
        return
    report = convert(before, there, source_format=source, target_format=target)
    assert (report.source_format, report.target_format) == (source, target)
    assert report.converted == len(modules)
    assert report.skipped == {}
    assert_holds(there, target, modules)
    convert(there, back, target_format=source)
    assert_same_tensors(before, back)
    assert opened(back).config.raw["quant_method"] == opened(before).config.raw["quant_method"]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_biases_shards_and_plain_tensors_are_carried(tmp_path: Path, source: str, target: str) -> None:
    modules = model_tuples()
    plain = plain_tensors(modules, bias=True)
    before = write(tmp_path / "before", source, modules, plain=plain, shards=3)
    report = convert(before, tmp_path / "after", target_format=target, max_shard_size=60_000)
    after = all_tensors(tmp_path / "after")
    for name, tensor in plain.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    assert report.carried == len(plain)
    index = json.loads((tmp_path / "after" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    convert(tmp_path / "after", tmp_path / "back", target_format=source)
    assert_same_tensors(before, tmp_path / "back")


@pytest.mark.parametrize("target", ["gptq-v2", "marlin", "compressed-tensors"])
def test_groups_that_differ_by_module_are_kept(tmp_path: Path, target: str) -> None:
    modules = model_tuples(group_size=64)
    finer = {name: q for name, q in model_tuples(group_size=32).items() if name.endswith("down_proj")}
    del modules["model.layers.1.self_attn.o_proj"]
    modules |= finer
    plain = plain_tensors(modules)
    plain["model.layers.1.self_attn.o_proj.weight"] = torch.randn(128, 128).half()
    kept = ("lm_head", "model.layers.1.self_attn.o_proj")
    before = write(tmp_path / "before", "gptq", modules, plain=plain, unquantized=kept)
    convert(before, tmp_path / "after", target_format=target)
    assert_holds(tmp_path / "after", target, modules)
    after = opened(tmp_path / "after")
    assert after.unquantized_linears() == opened(before).unquantized_linears()
    assert {after.modules[name].granularity for name in finer} == {Granularity.group(32)}
    convert(tmp_path / "after", tmp_path / "back", target_format="gptq")
    assert_same_tensors(before, tmp_path / "back")
    with pytest.raises(ConversionRefused, match=r"group sizes \[32, 64\]"):
        convert(before, tmp_path / "awq", target_format="awq")
    assert not list(tmp_path.glob("awq*"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_v1_and_v2_differ_in_qzeros_only(tmp_path: Path, dtype: torch.dtype) -> None:
    modules = model_tuples(zeros="one-up", dtype=dtype)
    before = write(tmp_path / "before", "gptq", modules, scale_dtype=dtype)
    convert(before, tmp_path / "after", target_format="gptq-v2")
    one, two = all_tensors(before), all_tensors(tmp_path / "after")
    for name, tensor in one.items():
        same = torch.equal(tensor, two[name]) and tensor.dtype == two[name].dtype
        assert same != name.endswith("qzeros"), name


@pytest.mark.parametrize("target", ["gptq", "awq", "compressed-tensors"])
def test_side_files_are_copied_and_weights_in_other_formats_named(tmp_path: Path, target: str) -> None:
    before = write(tmp_path / "before", "marlin", model_tuples())
    (before / "pytorch_model.bin").write_bytes(b"not read")
    report = convert(before, tmp_path / "after", target_format=target)
    for name, text in SIDE_FILES.items():
        assert (tmp_path / "after" / name).read_text() == text
    assert set(report.side_files) == set(SIDE_FILES)
    assert report.left_out == ("pytorch_model.bin",)
    assert "pytorch_model.bin" in report.render()
    config = json.loads((tmp_path / "after" / "config.json").read_text())
    raw = config.pop("quantization_config")
    # The stored head is no copy of the embedding, which the source leaves to the model's default.
    assert config == {**CONFIG, "tie_word_embeddings": False}
    beside = tmp_path / "after" / "quantize_config.json"
    assert beside.exists() == (target != "compressed-tensors")
    if beside.exists():
        assert json.loads(beside.read_text()) == raw


def test_scales_follow_the_model_where_that_is_exact(tmp_path: Path) -> None:
    modules = model_tuples(dtype=torch.bfloat16)
    bfloat = {**CONFIG, "dtype": "bfloat16"}
    before = write(tmp_path / "before", "compressed-tensors", modules, config=bfloat)
    convert(before, tmp_path / "gptq", target_format="gptq")
    assert all_tensors(tmp_path / "gptq")["model.layers.0.mlp.up_proj.scales"].dtype == torch.float16
    report = convert(tmp_path / "gptq", tmp_path / "back", target_format="compressed-tensors")
    assert report.notes == ()
    assert_same_tensors(before, tmp_path / "back")

    exact = write(tmp_path / "exact", "gptq", model_tuples(), config=bfloat)
    report = convert(exact, tmp_path / "kept", target_format="compressed-tensors")
    assert all_tensors(tmp_path / "kept")["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float16
    assert any("bfloat16" in note for note in report.notes)


def test_chance_middle_zeros_do_not_split_a_fused_layer(tmp_path: Path) -> None:
    modules = model_tuples(zeros="one-up")
    plain = model_tuples()
    modules["model.layers.0.self_attn.k_proj"] = plain["model.layers.0.self_attn.k_proj"]
    before = write(tmp_path / "before", "awq", modules)
    convert(before, tmp_path / "after", target_format="compressed-tensors")
    assert_holds(tmp_path / "after", "compressed-tensors", modules)
    assert (
        "model.layers.0.self_attn.k_proj.weight_zero_point" in opened(tmp_path / "after").checkpoint.tensors
    )
    assert len(opened(tmp_path / "after").config.raw["config_groups"]) == 1


def test_a_config_inside_text_config_is_replaced(tmp_path: Path) -> None:
    before = write(tmp_path / "before", "gptq", model_tuples())
    config = json.loads((before / "config.json").read_text())
    config["text_config"] = {"model_type": "llama", "quantization_config": config.pop("quantization_config")}
    (before / "config.json").write_text(json.dumps(config))
    convert(before, tmp_path / "after", target_format="awq")
    after = json.loads((tmp_path / "after" / "config.json").read_text())
    assert after["quantization_config"]["quant_method"] == "awq"
    assert after["text_config"] == {"model_type": "llama"}


def test_the_manifest_keeps_the_sources_manifest(tmp_path: Path) -> None:
    before = write(tmp_path / "before", "gptq", model_tuples())
    (before / "marlinq.json").write_text(json.dumps({"recipe": {"seed": 7}, "tensors": {"x": "0"}}))
    convert(before, tmp_path / "after", target_format="marlin")
    manifest = json.loads((tmp_path / "after" / "marlinq.json").read_text())
    assert manifest["source"] == {"recipe": {"seed": 7}}
    assert (manifest["source_format"], manifest["format"]) == ("gptq", "marlin")
    assert set(manifest["tensors"]) == set(all_tensors(tmp_path / "after"))
