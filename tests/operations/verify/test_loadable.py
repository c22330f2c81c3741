"""Folders that verify passes are loaded by load and opened by the safetensors library."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marlinq.core.errors import MarlinqError
from marlinq.operations.verify import verify
from marlinq.runtime import load
from tests.testing.runnable_folders import random_quantizer, save_quantized, save_tokenizer
from tests.testing.tiny_models import tiny_model

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    save_quantized(path, tiny_model("llama"), "gptq", random_quantizer())
    save_tokenizer(path)
    return path


def failed(folder: Path) -> set[str]:
    return {check.name for check in verify(folder, device="cpu").checks if check.status == "failed"}


def tensors(**changes: Any) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        save_file({**found, **changes}, folder / "model.safetensors")

    return harm


def put(name: str, value: float) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        found[name].view(-1)[5] = value
        save_file(found, folder / "model.safetensors")

    return harm


def config(**changes: Any) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**found, **changes}))

    return harm


def content(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def test_a_whole_folder_passes_and_loads(folder: Path) -> None:
    assert failed(folder) == set()
    load(folder, device="cpu")


@pytest.mark.parametrize("name", [NORM, EMBEDDING])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_tensor_holds_what_is_no_number(folder: Path, name: str, value: float) -> None:
    put(name, value)(folder)
    assert failed(folder) == {"finite"}


NOT_LOADABLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a permutation nobody reads": (tensors(**{"x.perm": torch.arange(64)}), "tensors"),
    "a stray g_idx": (tensors(**{"model.layers.9.g_idx": torch.zeros(4)}), ""),
    "another format's shape": (
        tensors(**{"model.layers.0.mlp.up_proj.weight_shape": torch.tensor([128, 64])}),
        "",
    ),
    "a bias of another length": (tensors(**{"model.layers.0.mlp.up_proj.bias": torch.zeros(3)}), "loads"),
    "no such architecture": (config(model_type="no-such-model"), "loads"),
    "no heads": (config(num_attention_heads=0), "loads"),
    "layers beyond reason": (config(num_hidden_layers=1 << 40), "loads"),
    "a layer less": (config(num_hidden_layers=2), "tensors"),
    "a tokenizer of nonsense": (content("tokenizer.json", '{"model": 3}'), "loads"),
    "a generation config of nonsense": (content("generation_config.json", "[]"), "loads"),
}


@pytest.mark.parametrize("name", NOT_LOADABLE)
def test_folders_that_load_refuses_fail_in_verify(folder: Path, name: str) -> None:
    harm, row = NOT_LOADABLE[name]
    harm(folder)
    with pytest.raises(MarlinqError):
        load(folder, device="cpu")
    found = failed(folder)
    assert row in found if row else found


def test_files_that_safetensors_refuses_fail_in_verify(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    # Read by a parser that takes more than the library does.
    monkeypatch.setattr("marlinq.checkpoint.header._check_metadata", lambda path, metadata: None)
    header = data[8 : 8 + length].decode().rstrip()
    header = header[:-1] + ',"__metadata__":{"a":{"b":1}}}' if "__metadata__" not in header else header
    text = header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    assert failed(folder) == {"safetensors"}


def test_a_tensor_that_changed_its_dtype_or_shape_fails_under_a_manifest(
    quantized: Callable[..., Path], tmp_path: Path
) -> None:
    from tests.testing import faults

    for number, (name, edit) in enumerate(
        (
            (EMBEDDING, lambda tensor: tensor.view(torch.bfloat16)),
            (NORM, lambda tensor: tensor.reshape(2, -1)),
        )
    ):
        copy = faults.copy(quantized("gptq"), tmp_path / str(number), manifest=True)
        faults.change(copy, name, edit)
        report = verify(copy, device="cpu")
        manifest = next(check for check in report.checks if check.name == "manifest")
        assert manifest.status == "failed"
        assert f"{name}: expected float16 [" in manifest.detail


def test_an_older_manifest_says_that_it_tells_less(quantized: Callable[..., Path], tmp_path: Path) -> None:
    from tests.testing import faults

    copy = faults.copy(quantized("gptq"), tmp_path / "copy", manifest=True)
    manifest = json.loads((copy / "marlinq.json").read_text())
    del manifest["headers"]
    (copy / "marlinq.json").write_text(json.dumps(manifest))
    report = verify(copy, device="cpu")
    assert report.ok
    assert "an older manifest" in next(c for c in report.checks if c.name == "manifest").detail
