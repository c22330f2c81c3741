"""Faults that only mixtures of experts can have: each is planted by name and has to be found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from marlinq.formats import ModuleSpec, spec_of
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.quantize import Recipe, quantize
from marlinq.operations.verify import verify
from tests.testing import faults
from tests.testing.layouts import INTEGERS
from tests.testing.mixtures import save_mixture
from tests.testing.schemes import scheme

LAYOUT = INTEGERS["compressed-tensors"]
EXPERTS = "model.layers.0.mlp.experts"
GATE = "model.layers.0.mlp.gate"
SPEC = ModuleSpec(64, 64, scheme(32, scale_dtype="bfloat16"))
Tensors = dict[str, Tensor]


def move(tensors: Tensors, first: str, second: str) -> None:
    """Exchange all tensors of two modules."""
    for suffix in LAYOUT.suffixes:
        one, other = f"{first}.{suffix}", f"{second}.{suffix}"
        if one in tensors:
            tensors[one], tensors[other] = tensors[other], tensors[one]


def swap_experts(tensors: Tensors) -> None:
    for part in ("gate_proj", "up_proj", "down_proj"):
        move(tensors, f"{EXPERTS}.1.{part}", f"{EXPERTS}.3.{part}")


def swap_one_matrix(tensors: Tensors) -> None:
    move(tensors, f"{EXPERTS}.0.down_proj", f"{EXPERTS}.1.down_proj")


def exchange_gate_and_up(tensors: Tensors) -> None:
    move(tensors, f"{EXPERTS}.2.gate_proj", f"{EXPERTS}.2.up_proj")


def lose_an_expert(tensors: Tensors) -> None:
    for key in [key for key in tensors if key.startswith(f"{EXPERTS}.3.")]:
        del tensors[key]


def lose_a_matrix(tensors: Tensors) -> None:
    for key in [key for key in tensors if key.startswith(f"{EXPERTS}.3.up_proj.")]:
        del tensors[key]


def quantize_the_router(tensors: Tensors) -> None:
    weight = tensors.pop(f"{GATE}.weight").float()
    q = round_to_nearest(weight, scheme(32))
    packed = LAYOUT.pack(q, spec_of(q).scheme)
    tensors.update({f"{GATE}.{suffix}": value for suffix, value in packed.items()})


def transpose_an_expert(tensors: Tensors) -> None:
    """A square matrix, so that no shape tells."""
    name = f"{EXPERTS}.0.down_proj"
    q = LAYOUT.unpack({suffix: tensors[f"{name}.{suffix}"] for suffix in present(tensors, name)}, SPEC)
    turned = round_to_nearest(q.dequantize().t().contiguous(), SPEC.scheme)
    for suffix, value in LAYOUT.pack(turned, SPEC.scheme).items():
        tensors[f"{name}.{suffix}"] = value


def present(tensors: Tensors, name: str) -> list[str]:
    return [suffix for suffix in LAYOUT.suffixes if f"{name}.{suffix}" in tensors]


def recast_the_bias(tensors: Tensors) -> None:
    name = f"{GATE}.e_score_correction_bias"
    assert tensors[name].dtype == torch.float32
    tensors[name] = tensors[name].bfloat16().float()


def narrow_the_bias(tensors: Tensors) -> None:
    name = f"{GATE}.e_score_correction_bias"
    tensors[name] = tensors[name].bfloat16()


def add_an_expert(tensors: Tensors) -> None:
    for key in [key for key in tensors if key.startswith(f"{EXPERTS}.0.")]:
        tensors[key.replace(".0.", ".4.")] = tensors[key].clone()


def forget_the_router(tensors: Tensors) -> None:
    del tensors[f"{GATE}.weight"]


FAULTS: dict[Callable[[Tensors], None], str] = {
    swap_experts: r"weights: .*experts\.(1|3)\.",
    swap_one_matrix: r"weights: .*experts\.(0|1)\.down_proj",
    exchange_gate_and_up: r"weights: .*experts\.2\.(gate|up)_proj",
    lose_an_expert: r"tensors: .*experts\.3\.",
    lose_a_matrix: r"tensors: .*experts\.3\.up_proj",
    quantize_the_router: r"config: .*mlp\.gate.*excludes it",
    transpose_an_expert: r"weights: .*experts\.0\.down_proj",
    recast_the_bias: r"unquantised tensors: .*e_score_correction_bias: differs",
    narrow_the_bias: r"unquantised tensors: .*e_score_correction_bias: bfloat16.*float32",
    add_an_expert: r"tensors: .*experts\.4\.",
    forget_the_router: r"tensors: .*mlp\.gate\.weight: missing",
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GLM-4.5 of one layer: every expert is square (I = H = 64), the correction bias in float32."""
    root = tmp_path_factory.mktemp("mixture")
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_intermediate_size": 64}
    save_mixture(root / "model", "glm-4.5", **changes)
    path = root / "model" / "model.safetensors"
    tensors = load_file(path)
    bias = f"{GATE}.e_score_correction_bias"
    tensors[bias] = 0.05 * torch.randn(4, generator=torch.Generator().manual_seed(7))
    save_file(tensors, path, metadata={"format": "pt"})
    recipe = Recipe(format="compressed-tensors", group_size=32, method="rtn")
    quantize(root / "model", root / "int4", recipe=recipe, device="cpu")
    return root


def problems(folder: Path, original: Path) -> list[str]:
    checks = verify(folder, against=original, device="cpu").checks
    return [
        f"{check.name}: {line}"
        for check in checks
        if check.status == "failed"
        for line in (check.problems or (check.detail,))
    ]


def test_the_clean_folder_passes(clean: Path) -> None:
    assert problems(clean / "int4", clean / "model") == []


# With a manifest every change of a file is found: test_faults.py plants one of each kind.
@pytest.mark.parametrize("manifest", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(
    plant: Callable[[Tensors], None], manifest: bool, clean: Path, tmp_path: Path
) -> None:
    folder = faults.copy(clean / "int4", tmp_path / "bad", manifest=manifest)
    tensors = load_file(folder / "model.safetensors")
    plant(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = problems(folder, clean / "model")
    assert any(re.search(FAULTS[plant], line) for line in found), found
    if manifest:
        assert any(line.startswith("manifest: ") for line in found)


def test_one_expert_of_another_scheme_is_found(clean: Path, tmp_path: Path) -> None:
    """Loaders look at expert 0 and take its scheme for all."""
    folder = faults.copy(clean / "int4", tmp_path / "bad", manifest=False)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    other = json.loads(json.dumps(groups["group_0"]))
    other["targets"] = [f"re:{EXPERTS}.2.up_proj"]
    other["weights"] |= {"group_size": 64}
    groups["group_1"] = other
    path.write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    name = f"{EXPERTS}.2.up_proj"
    q = LAYOUT.unpack({suffix: tensors[f"{name}.{suffix}"] for suffix in present(tensors, name)}, SPEC)
    coarse = round_to_nearest(q.dequantize(), scheme(-1))
    for suffix, value in LAYOUT.pack(coarse, coarse.scheme).items():
        tensors[f"{name}.{suffix}"] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = problems(folder, clean / "model")
    assert any("one scheme" in line and "experts.2.up_proj" in line for line in found), found
