"""Checkpoints of floats and 8-bit integers: transformers on a CPU gives our logits bit for bit.

Both sides multiply dequantised weights in bfloat16, the dtype of the model and of its scales, with torch's
own product. Where servers quantise activations, compressed-tensors imitates that; its checkpoints are
compared without, as :func:`weights_only` writes them, because marlinq multiplies activations of 16 bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe
from marlinq.runtime import load
from tests.interop.conftest import Answers, ask_peers
from tests.interop.make_peer_checkpoints import calibration_tokens, save_base
from tests.testing.runnable_folders import save_plain
from tests.testing.tiny_models import tiny_model

pytestmark = pytest.mark.interop

LOADERS = {"compressed-tensors": "transformers-default", "fp8": "transformers-fp8"}
EVERY = (
    ("int8", "compressed-tensors"),
    ("fp8", "compressed-tensors"),
    ("fp8-dynamic", "compressed-tensors"),
    ("fp8-static", "compressed-tensors"),
    ("fp8-static", "fp8"),
    ("fp8-block", "compressed-tensors"),
    ("fp8-block", "fp8"),
    ("mxfp8", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
    ("nvfp4", "compressed-tensors"),
)
"""Schemes and formats that transformers loads. It has no loader for ``modelopt``, which vLLM's test loads;
``gpt-oss`` and ``deepseek-v4`` are compared with it in tests/operations."""
MIXED = "mixed"
"""INT4 with modules in INT8, FP8 and NVFP4, in one checkpoint."""
OVERRIDES = ("down_proj$=scheme=fp8", "o_proj$=scheme=nvfp4", "(q|k|v)_proj$=scheme=int8")
NAMES = ["-".join(case) for case in EVERY] + [MIXED]


def weights_only(folder: Path) -> None:
    """Rewrites a config as that of the same weights with activations of 16 bits."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    stored = config["quantization_config"]
    for group in stored.get("config_groups", {}).values():
        if group["input_activations"] is not None:
            group["input_activations"] = None
            if group["format"] == "float-quantized":
                group["format"] = stored["format"] = "naive-quantized"
    path.write_text(json.dumps(config))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every case's checkpoint."""
    root = tmp_path_factory.mktemp("floats")
    save_base(root / "base", torch.bfloat16)
    text = root / "calibration.txt"
    text.write_text(
        "\n\n".join(" ".join(f"t{token}" for token in row) for row in calibration_tokens().tolist())
    )
    cases = {"-".join(case): (*case, ()) for case in EVERY}
    cases[MIXED] = ("int4", "compressed-tensors", tuple(map(Override.parse, OVERRIDES)))
    found = {}
    for name, (scheme, form, overrides) in cases.items():
        recipe = Recipe(
            method="rtn", scheme=scheme, format=form, overrides=overrides,
            calibration=str(text), samples=1, max_length=32,
        )  # fmt: skip
        quantize(root / "base", root / name, recipe=recipe, device="cpu", progress=False)
        found[name] = root / name
    return found


@pytest.fixture(scope="session")
def answers(folders: dict[str, Path], tokens: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """transformers' reading of every case."""
    root = tmp_path_factory.mktemp("float-answers")
    jobs = {}
    for name, folder in folders.items():
        copy = root / name
        shutil.copytree(folder, copy)
        weights_only(copy)
        method = json.loads((copy / "config.json").read_text())["quantization_config"]["quant_method"]
        jobs[name] = (copy, LOADERS[method])
    return ask_peers(root, tokens, jobs, dtype="bfloat16", decoded=False)


@pytest.mark.parametrize("name", NAMES)
def test_transformers_says_what_we_say(
    name: str, folders: dict[str, Path], answers: Answers, tokens: Tensor, table: list[str]
) -> None:
    model = load(folders[name], device="cpu", dtype="bfloat16", operator="dense", progress=False).model
    with torch.no_grad():
        ours = model(tokens).logits.float()
    peer = answers.tensors(name)["logits"]
    assert float(ours.std()) > 0.1
    assert torch.equal(peer, ours)
    table.append(f"{name:32} by transformers: the same logits in bfloat16, bit for bit")


def test_ragged_blocks_are_refused_or_read_wrongly(tmp_path: Path, tokens: Tensor) -> None:
    """Why ``servers.toml`` asks transformers' checkpoints for whole blocks."""
    model = tiny_model("llama", seed=3, vocab_size=320, hidden_size=192, intermediate_size=288)
    original = save_plain(tmp_path / "original", model.bfloat16())
    jobs, ours = {}, {}
    for form, loader in LOADERS.items():
        recipe = Recipe(method="rtn", scheme="fp8-block", format=form)
        quantize(original, tmp_path / form, recipe=recipe, device="cpu", progress=False)
        jobs[form] = tmp_path / form, loader
        loaded = load(tmp_path / form, device="cpu", dtype="bfloat16", operator="dense", progress=False)
        with torch.no_grad():
            ours[form] = loaded.model(tokens).logits.float()
    weights = tmp_path / "weights"
    shutil.copytree(tmp_path / "compressed-tensors", weights)
    weights_only(weights)
    jobs["weights"] = weights, LOADERS["compressed-tensors"]
    answers = ask_peers(tmp_path, tokens, jobs, dtype="bfloat16", decoded=False)
    # It cuts 192 inputs into groups of 128; weights alone it reads.
    assert "unflatten" in (answers.error("compressed-tensors") or "")
    assert torch.equal(answers.tensors("weights")["logits"], ours["compressed-tensors"])
    difference = answers.tensors("fp8")["logits"] - ours["fp8"]
    assert float(difference.norm()) > 0.1 * float(ours["fp8"].norm())
