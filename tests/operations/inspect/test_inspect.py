"""What inspect says of checkpoints in every layout, and which kernels it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marlinq.core.errors import CheckpointError
from marlinq.formats import LAYOUTS
from marlinq.operations.inspect import Inspection, inspect
from marlinq.operations.inspect.eligibility import KERNELS
from tests.testing.quantized_folders import CONFIG, model_tuples, plain_tensors, random_tuple, write

UP = "model.layers.0.mlp.up_proj"


def kernels(inspection: Inspection) -> dict[str, bool]:
    return {item.kernel: item.eligible for item in inspection.kernels}


def one(k: int, n: int, **settings: Any) -> dict[str, Any]:
    return {UP: random_tuple(k, n, 1, **settings)}


@pytest.mark.parametrize("layout", LAYOUTS)
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
    assert set(kernels(found)) == set(KERNELS)


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
    assert not kernels(found)["marlin (vLLM)"]


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
    assert not any(kernels(found).values())


def test_an_unquantised_checkpoint(tmp_path: Path) -> None:
    tensors = plain_tensors({})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model.safetensors")
    found = inspect(tmp_path)
    assert found.format is None
    assert found.kernels == ()
    assert found.unquantized_modules == ("lm_head",)
    assert found.parameters == sum(tensor.numel() for tensor in tensors.values())
    assert found.model_bits == 8 * sum(tensor.nbytes for tensor in tensors.values()) / found.parameters
    assert "not quantised" in found.render()


def test_damage_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "gptq", model_tuples())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="qzeros: expected"):
        inspect(folder)


ALL = set(KERNELS)
VLLM = {"marlin (vLLM)", "machete", "exllama"}
CASES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "everything": ("gptq", one(256, 256, group_size=128), ALL),
    "one group": ("gptq", one(256, 256, group_size=-1), ALL - {"exllama"}),
    "group 64": ("gptq", one(256, 256, group_size=64), ALL - {"marlin (original)"}),
    "group 32": ("gptq", one(256, 256, group_size=32), {"marlin (vLLM)", "exllama", "marlinq"}),
    "group 16": ("gptq", one(256, 256, group_size=16), {"exllama"}),
    "group 96": ("gptq", one(192, 256, group_size=96), {"exllama", "marlinq"}),
    "narrow": ("gptq", one(256, 64, group_size=128), {"marlin (vLLM)", "exllama", "marlinq"}),
    "marlin layout": ("marlin", one(256, 256, group_size=128), {"marlin (original)", "marlinq"}),
    "v2": ("gptq-v2", one(256, 256, group_size=128), ALL),
    "8 bits": ("gptq", one(256, 256, group_size=128, bits=8), VLLM),
    "GPTQ asymmetric": ("gptq", one(256, 256, group_size=128, zeros="one-up"), {"marlinq"}),
    "AWQ": (
        "awq",
        one(256, 256, group_size=128),
        {"marlin (original)", "marlin (vLLM)", "machete", "marlinq"},
    ),
    "AWQ asymmetric": (
        "awq",
        one(256, 256, group_size=128, zeros="any"),
        {"marlin (vLLM)", "machete", "marlinq"},
    ),
    "CT": ("compressed-tensors", one(256, 256, group_size=128), ALL),
    "CT asymmetric": (
        "compressed-tensors",
        one(256, 256, group_size=128, zeros="any"),
        {"marlin (vLLM)", "machete", "marlinq"},
    ),
    "CT asymmetric 8 bits": (
        "compressed-tensors",
        one(256, 256, group_size=128, zeros="any", bits=8),
        {"machete"},
    ),
    "activation order": ("gptq", one(256, 256, group_size=128, scattered=True), {"marlinq"}),
}


@pytest.mark.parametrize("name", CASES)
def test_which_kernels_can_run_it(tmp_path: Path, name: str) -> None:
    layout, modules, able = CASES[name]
    found = inspect(write(tmp_path / "x", layout, modules))
    assert {kernel for kernel, eligible in kernels(found).items() if eligible} == able
    for item in found.kernels:
        assert item.reason
        assert item.modules == (1 if item.eligible else 0)
        assert item.eligible or item.reason.startswith(f"{UP}: ")


def test_one_module_in_the_way_is_counted(tmp_path: Path) -> None:
    modules = {
        **one(256, 256, group_size=128),
        "model.layers.1.mlp.up_proj": random_tuple(256, 64, 2, group_size=128),
    }
    found = inspect(write(tmp_path / "x", "gptq", modules))
    machete = next(item for item in found.kernels if item.kernel == "machete")
    assert (machete.eligible, machete.modules) == (False, 1)
    assert machete.reason.startswith("model.layers.1.mlp.up_proj: ")
