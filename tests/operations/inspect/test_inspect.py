"""Reports of inspect on checkpoints in every layout, and the kernels that they name."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marlinq.cli import main
from marlinq.core.errors import CheckpointError, UsageError, VerificationFailed
from marlinq.operations.convert import convert
from marlinq.operations.inspect import Inspection, ServerVerdict, inspect
from marlinq.operations.inspect.stored_values import _decoded, stored_facts
from marlinq.operations.quantize import Recipe, quantize
from marlinq.runtime import load
from tests.testing.layouts import INTEGERS
from tests.testing.original_folders import save_tiny
from tests.testing.quantized_folders import model_tuples, opened, plain_tensors, random_tuple, write

UP = "model.layers.0.mlp.up_proj"


SERVERS = ("marlinq", "vLLM", "SGLang", "transformers", "GPTQModel", "Marlin (IST-DASLab)")


def one(k: int, n: int, **settings: Any) -> dict[str, Any]:
    return {UP: random_tuple(k, n, 1, **settings)}


@pytest.mark.parametrize("layout", INTEGERS)
def test_the_facts_of_a_symmetric_checkpoint(tmp_path: Path, layout: str) -> None:
    modules = model_tuples(group_size=64)
    folder = write(tmp_path / "x", layout, modules, shards=2)
    found = inspect(folder, modules=True)
    assert (found.format, found.bits, found.group_sizes) == (layout, (4,), (64,))
    assert found.symmetry == "symmetric"
    assert found.g_idx == ("in order" if layout in ("gptq", "gptq-v2") else "none")
    assert found.unquantized_modules == ("lm_head",)
    weights = sum(q.codes.numel() for q in modules.values())
    assert found.quantized_parameters == weights
    assert found.parameters == weights + sum(tensor.numel() for tensor in plain_tensors(modules).values())
    assert found.bytes_on_disk == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    # 4 bits a code, 16 a scale, 4 a zero where stored, 32 a channel for g_idx, 128 a module for its shape.
    extra = {"gptq": 4, "gptq-v2": 4, "awq": 4, "marlin": 0, "compressed-tensors": 0}[layout]
    bits = 0
    for q in modules.values():
        bits += 4 * q.codes.numel() + (16 + extra) * q.scales.numel()
        bits += 32 * q.in_features if layout.startswith("gptq") else 0
        bits += 128 if layout == "compressed-tensors" else 0
    assert found.linear_bits == bits / weights
    assert found.modules is not None
    assert {module.name for module in found.modules} == set(modules)
    assert UP in found.render()
    assert inspect(folder).modules is None
    assert json.loads(json.dumps(found.to_dict()))["format"] == layout
    assert tuple(verdict.server for verdict in found.servers) == SERVERS


@pytest.mark.parametrize(
    ("settings", "symmetry", "order"),
    [
        ({"zeros": "one-up"}, "asymmetric", "in order"),
        ({"scattered": True}, "symmetric", "activation order"),
    ],
)
def test_symmetry_and_order_come_from_the_data(
    tmp_path: Path, settings: dict[str, Any], symmetry: str, order: str
) -> None:
    folder = write(tmp_path / "x", "gptq", model_tuples(**settings), quantization={"desc_act": False})
    found = inspect(folder)
    assert (found.symmetry, found.g_idx) == (symmetry, order)
    assert any("desc_act: false" in note for note in found.notes) == (order == "activation order")


def test_a_flag_without_order_is_noted(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "gptq", model_tuples(), quantization={"desc_act": True})
    found = inspect(folder)
    assert found.g_idx == "in order"
    assert any("desc_act: true" in note for note in found.notes)
    assert "desc_act: true" in servers(found)["vLLM"].reason


def test_mixed_settings(tmp_path: Path) -> None:
    modules = {**model_tuples(), "model.layers.0.mlp.up_proj": random_tuple(128, 256, 1, group_size=64)}
    modules["model.layers.1.mlp.up_proj"] = random_tuple(128, 256, 1, zeros="one-up", scattered=True)
    found = inspect(write(tmp_path / "x", "gptq", modules))
    assert found.group_sizes == (32, 64)
    assert (found.symmetry, found.g_idx) == ("mixed", "mixed")


def test_zeros_that_cannot_be_decoded_are_reported_not_raised(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "gptq", model_tuples(zeros="one-up"))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}.qzeros"] = torch.full_like(tensors[f"{UP}.qzeros"], -1)
    save_file(tensors, folder / "model.safetensors")
    found = inspect(folder, modules=True)
    assert found.symmetry == "unknown"
    assert any(note.startswith(f"{UP}: qzeros: ") for note in found.notes)
    assert not any(verdict.loads for verdict in found.servers)


def test_an_unquantised_checkpoint(tmp_path: Path) -> None:
    tensors = load_file(save_tiny("llama", tmp_path) / "model.safetensors")
    found = inspect(tmp_path)
    assert found.format is None
    assert found.servers == ()
    assert found.unjudged == SERVERS
    built = inspect(tmp_path, build=True)
    assert [(each.server, each.loads) for each in built.servers] == [("marlinq", True)]
    assert built.unjudged == SERVERS[1:]
    linears = {
        name.removesuffix(".weight") for name in tensors if name.endswith(("proj.weight", "head.weight"))
    }
    assert len(found.unquantized_modules) == 22
    assert set(found.unquantized_modules) == linears
    assert found.notes == ()
    assert found.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert found.model_bits == 8 * sum(tensor.nbytes for tensor in tensors.values()) / found.parameters
    assert "not quantised" in found.render()


def code_for(folder: Path, *options: str) -> object:
    """Exit code of ``marlinq inspect``."""
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(folder), *options])
    return ended.value.code


NOT_JUDGED = "not judged (no rules for unquantised checkpoints): "


def test_only_a_server_known_to_load_an_unquantised_checkpoint_gives_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = load_file(save_tiny("llama", tmp_path) / "model.safetensors")
    assert code_for(tmp_path) == 0
    assert NOT_JUDGED + ", ".join(SERVERS[1:]) in capsys.readouterr().out
    assert code_for(tmp_path, "--for", "marlinq") == 0
    assert "not judged" not in capsys.readouterr().out
    assert code_for(tmp_path, "--for", "vllm") == VerificationFailed.exit_code
    assert f"\n{NOT_JUDGED}vLLM\n" in capsys.readouterr().out
    assert code_for(tmp_path, "--for", "marlinq", "--tp", "2") == VerificationFailed.exit_code
    assert "\nnot judged, as they split no layer: marlinq\n" in capsys.readouterr().out
    for tensors in ({"model.layers.0.odd.weight": torch.ones(2, 2)}, {f"{UP}.qweight": torch.ones(2).int()}):
        save_file(stored | tensors, tmp_path / "model.safetensors")
        assert code_for(tmp_path, "--for", "marlinq") == VerificationFailed.exit_code


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(
    ("config", "without", "reason"),
    [
        ({}, None, ""),
        ({"model_type": "nosuch"}, None, "language model of type 'nosuch'"),
        ({"num_hidden_layers": 4}, None, "expected a tensor 'model.layers.3."),
        ({"vocab_size": 256}, None, "'model.embed_tokens.weight': expected shape [256, 64]"),
        ({"intermediate_size": 256}, None, "model.layers.0.mlp.gate_proj"),
        ({}, "model.norm.weight", "expected a tensor 'model.norm.weight'"),
        ({}, "model.embed_tokens.weight", "expected a tensor 'model.embed_tokens.weight'"),
    ],
)
def test_the_verdict_on_a_built_model_is_what_load_does(
    tmp_path: Path, config: dict[str, Any], without: str | None, reason: str, quantised: bool
) -> None:
    folder = save_tiny("llama", tmp_path / "plain")
    if quantised:
        recipe = Recipe(method="rtn", group_size=32)
        quantize(folder, tmp_path / "quantised", recipe=recipe, device="cpu", progress=False)
        folder = tmp_path / "quantised"
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | config))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if name != without}
    save_file(kept, folder / "model.safetensors")
    found = inspect(folder, build=True)
    own = servers(found)["marlinq"]
    assert own.loads == (config == {} and without is None)
    assert reason in own.reason
    assert found.notes == ()
    if own.loads:
        load(folder, device="cpu", progress=False)
        return
    with pytest.raises(CheckpointError) as refusal:
        load(folder, device="cpu", progress=False)
    assert str(refusal.value).endswith(own.reason)


def test_a_zero_point_beside_the_middle_of_symmetric_weights(tmp_path: Path) -> None:
    plain, folder = save_tiny("llama", tmp_path / "plain"), tmp_path / "quantised"
    recipe = Recipe(method="rtn", group_size=32, format="gptq")
    quantize(plain, folder, recipe=recipe, device="cpu", progress=False)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}.qzeros"][0, 0] ^= 1
    save_file(tensors, folder / "model.safetensors")
    (folder / "marlinq.json").unlink()
    found = inspect(folder)
    assert not any(each.loads for each in found.servers)
    assert servers(found)["vLLM"].reason == f"{UP}: its stored values can't be read (see the note)"
    with pytest.raises(CheckpointError) as refusal:
        load(folder, device="cpu", progress=False)
    assert found.notes == (str(refusal.value).removeprefix(f"{folder}: "),)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_file_beside_the_model_that_load_cannot_read(tmp_path: Path, name: str) -> None:
    folder = save_tiny("llama", tmp_path)
    assert servers(inspect(folder, build=True))["marlinq"].loads
    (folder / name).write_text("{")
    own = servers(inspect(folder, build=True))["marlinq"]
    assert not own.loads
    with pytest.raises(CheckpointError) as refusal:
        load(folder, device="cpu", progress=False)
    assert str(refusal.value) in (own.reason, f"{folder}: {own.reason}")


def test_a_model_that_cannot_be_built_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "architectures": ["ViTModel"]}))
    save_file({"embeddings.cls_token": torch.ones(1, 1, 8)}, tmp_path / "model.safetensors")
    (own,) = inspect(tmp_path, build=True).servers
    assert not own.loads
    assert own.reason.startswith("model type 'vit' has no language model")


def test_damage_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "gptq", model_tuples())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="qzeros: expected"):
        inspect(folder)


def servers(inspection: Inspection) -> dict[str, ServerVerdict]:
    return {verdict.server: verdict for verdict in inspection.servers}


CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "symmetric GPTQ": ("gptq", one(256, 256, group_size=128), {*SERVERS}),
    "v2": ("gptq-v2", one(256, 256, group_size=128), {*SERVERS}),
    "AWQ": ("awq", one(256, 256, group_size=128), {*SERVERS}),
    "CT": ("compressed-tensors", one(256, 256, group_size=128), {*SERVERS} - {"GPTQModel"}),
    "marlin": ("marlin", one(256, 256, group_size=128), {"marlinq", "Marlin (IST-DASLab)"}),
    "8 bits": ("gptq", one(256, 256, group_size=128, bits=8), {*SERVERS}),
    "asymmetric GPTQ": ("gptq", one(256, 256, group_size=128, zeros="one-up"), {"marlinq"}),
    "asymmetric v2": (
        "gptq-v2",
        one(256, 256, group_size=128, zeros="any"),
        {"marlinq", "transformers", "GPTQModel"},
    ),
    "asymmetric CT": (
        "compressed-tensors",
        one(256, 256, group_size=128, zeros="any"),
        {"marlinq", "vLLM", "SGLang"},
    ),
    "hidden activation order": ("gptq", one(256, 256, group_size=128, scattered=True), {"marlinq"}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_report_names_servers_that_load_it(tmp_path: Path, name: str) -> None:
    layout, modules, able = CASES[name]
    settings = {"desc_act": False} if "order" in name else {}
    found = servers(inspect(write(tmp_path / "x", layout, modules, quantization=settings)))
    loading = {server for server, verdict in found.items() if verdict.loads}
    assert loading - {"Marlin (IST-DASLab)"} == able - {"Marlin (IST-DASLab)"}
    assert found["Marlin (IST-DASLab)"].loads == (layout == "marlin")


def test_heads_come_from_the_config(tmp_path: Path) -> None:
    modules = {"model.layers.0.self_attn.k_proj": random_tuple(256, 256, 1, group_size=128)}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    folder = write(tmp_path / "x", "gptq", modules, config=heads)
    divided = inspect(folder, tensor_parallel=3)
    assert "not judged, as they split no layer: marlinq, transformers" in divided.render()
    found = servers(divided)
    assert "2 key-value heads can't be shared by 3 GPUs" in found["vLLM"].reason
    assert servers(inspect(folder, tensor_parallel=4))["vLLM"].loads
    with pytest.raises(UsageError, match="found 0"):
        inspect(folder, tensor_parallel=0)


def _held() -> list[tuple[str, str, bool, int]]:
    """Layout, zero points, activation order and bits, as far as the layout can hold them."""
    everything = itertools.product(INTEGERS, ("middle", "one-up", "any"), (False, True), (4, 8))
    return [
        (layout, zeros, scattered, bits)
        for layout, zeros, scattered, bits in everything
        if INTEGERS[layout].refusal(random_tuple(128, 64, 1, zeros=zeros, scattered=scattered, bits=bits))
        is None
    ]


@pytest.mark.parametrize(("layout", "zeros", "scattered", "bits"), _held())
def test_facts_read_without_torch_are_those_of_the_decoded_grids(
    tmp_path: Path, layout: str, zeros: str, scattered: bool, bits: int
) -> None:
    modules = model_tuples(zeros=zeros, scattered=scattered, bits=bits)
    quantized = opened(write(tmp_path / "x", layout, modules))
    assert next(iter(quantized.layouts.values())).plain is not None
    for name, q in modules.items():
        found = stored_facts(quantized, name)
        assert (found.symmetric, found.in_order) == (not q.scheme.stores_zeros, q.has_trivial_g_idx)
        assert found.sortable
        assert _decoded(quantized, name) == found


def test_a_layout_without_plain_facts_is_decoded_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "x", "gptq-v2", model_tuples(zeros="any"))
    before = inspect(folder)
    monkeypatch.setattr(INTEGERS["gptq-v2"], "plain", None)
    assert inspect(folder) == before


def test_torch_is_not_imported(tmp_path: Path) -> None:
    folders = [str(write(tmp_path / name, name, one(256, 256, group_size=128))) for name in INTEGERS]
    code = (
        "import sys\n"
        "from marlinq.cli import main\n"
        f"for folder in {folders}:\n"
        "    try:\n"
        "        main(['inspect', folder, '--modules'])\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code\n"
        "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("suffix", "value", "message"), [("g_idx", 99, "expected values in 0..0, found")])
def test_a_g_idx_out_of_range_is_damage(tmp_path: Path, suffix: str, value: int, message: str) -> None:
    folder = write(tmp_path / "x", "gptq", one(128, 64, group_size=128))
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{UP}.{suffix}"][3] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        inspect(folder)


@pytest.mark.parametrize("layout", INTEGERS)
def test_a_quantised_head_is_reported(tmp_path: Path, layout: str) -> None:
    modules = model_tuples(group_size=64, lm_head=True)
    found = inspect(write(tmp_path / "x", layout, modules, unquantized=()))
    assert found.head is not None
    assert found.head.startswith("int4, groups of 64")
    assert "output head" in found.render()
    assert not any("tie_word_embeddings" in note for note in found.notes)
    loads = {verdict.server: verdict.loads for verdict in found.servers}
    expected = {"gptq": True, "gptq-v2": True, "awq": True, "marlin": False, "compressed-tensors": True}
    assert loads["vLLM"] is expected[layout]
    assert inspect(write(tmp_path / "y", layout, model_tuples(group_size=64))).head is None


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_a_head_that_the_config_calls_tied_is_noted(tmp_path: Path, where: str) -> None:
    tied = {"tie_word_embeddings": True}
    config = tied if where == "top" else {"text_config": tied}
    modules = model_tuples(group_size=64, lm_head=True)
    found = inspect(write(tmp_path / "x", "gptq", modules, config=config, unquantized=()))
    assert any(
        "lm_head: is quantised, but the config says tie_word_embeddings" in note for note in found.notes
    )
    assert not {verdict.server: verdict.loads for verdict in found.servers}["SGLang"]
    convert(tmp_path / "x", tmp_path / "y", target_format="compressed-tensors")
    again = inspect(tmp_path / "y")
    assert not again.notes
    assert {verdict.server: verdict.loads for verdict in again.servers}["SGLang"]
    # One in 16 bits is noted where it is no copy of the embedding.
    plain = inspect(write(tmp_path / "z", "gptq", model_tuples(group_size=64), config=config))
    (note,) = plain.notes
    assert note.startswith("lm_head: differs from the embedding, but the config says tie_word_embeddings")


def test_a_head_that_the_config_is_silent_about(tmp_path: Path) -> None:
    modules = model_tuples(group_size=64, lm_head=True)
    gptq = write(tmp_path / "x", "gptq", modules, unquantized=(), quantization={"lm_head": False})
    vllm = {verdict.server: verdict for verdict in inspect(gptq).servers}["vLLM"]
    assert "lm_head: the config does not say that it is quantised" in vllm.reason
    ct = write(tmp_path / "y", "compressed-tensors", modules, unquantized=())
    config = json.loads((ct / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["targets"] = ["Linear"]
    (ct / "config.json").write_text(json.dumps(config))
    found = {verdict.server: verdict for verdict in inspect(ct).servers}
    assert not found["vLLM"].loads
    assert found["transformers"].loads


def test_dynamic_rules_that_miss_the_fused_name(tmp_path: Path) -> None:
    modules = model_tuples(group_size=64)
    for name in list(modules):
        if name.endswith(("gate_proj", "up_proj")):
            q = modules[name]
            modules[name] = random_tuple(q.in_features, q.out_features, 7, group_size=64, bits=8)
    made = write(tmp_path / "made", "gptq", modules)
    assert "dynamic rules" not in {v.server: v for v in inspect(made).servers}["vLLM"].reason
    rule = {r"+:.*mlp\.(gate|up)_proj$": {"bits": 8, "group_size": 64, "sym": True, "desc_act": False}}
    foreign = write(tmp_path / "foreign", "gptq", modules, quantization={"dynamic": rule})
    found = {verdict.server: verdict for verdict in inspect(foreign).servers}
    assert "mlp.gate_up_proj: the dynamic rules give it other settings" in found["vLLM"].reason
    assert not found["SGLang"].loads
    assert found["GPTQModel"].loads


def test_linears_of_experts_are_noted(tmp_path: Path) -> None:
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj" for expert in range(2)]
    folder = write(tmp_path / "x", "gptq", {name: random_tuple(128, 64, 1) for name in names})
    assert any(note.startswith("2 linears belong to experts") for note in inspect(folder).notes)
    plain = inspect(write(tmp_path / "y", "gptq", one(128, 64)))
    assert not any("experts" in note for note in plain.notes)


def test_a_draft_head_behind_the_last_block_is_noted(tmp_path: Path) -> None:
    """DeepSeek and GLM store their draft head as one block more than ``num_hidden_layers``."""
    folder = write(tmp_path / "x", "compressed-tensors", one(128, 64))
    tensors = load_file(folder / "model.safetensors")
    last = "model.layers.7.eh_proj"
    save_file(tensors | {f"{last}.weight": torch.ones(8, 16)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", r"re:.*layers\.7\..*"]
    for count, noted in ((7, 2), (8, 0)):
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count}))
        notes = [note for note in inspect(folder).notes if "draft head" in note]
        assert sum(last in note and "can draft with it" in note for note in notes) == noted
        assert sum("marlinq drafts" in note for note in notes) == (noted > 0)


def test_a_draft_head_that_a_server_would_miss_is_noted(tmp_path: Path) -> None:
    """The linears of ``mtp.*`` by name do not cover the ``qkv_proj`` that SGLang asks for."""
    draft = [f"mtp.layers.0.self_attn.{part}_proj" for part in "qkv"]
    folder = write(tmp_path / "x", "compressed-tensors", one(128, 64))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{name}.weight": torch.ones(8, 8) for name in draft}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    for ignored, missed in ((draft, True), (["re:^mtp.*"], False)):
        config["quantization_config"]["ignore"] = ["lm_head", *ignored]
        (folder / "config.json").write_text(json.dumps(config))
        notes = [note for note in inspect(folder).notes if "draft head" in note]
        assert len(notes) == 2
        assert any("SGLang" in note and "accepts no draft" in note for note in notes) == missed
        assert any("vLLM 0.33.0 can draft with it" in note for note in notes)
