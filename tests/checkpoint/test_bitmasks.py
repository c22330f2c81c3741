"""Folders of 16-bit weights with bitmasks are read as dense ones; damaged masks are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from marlinq.checkpoint import Checkpoint, with_dense_weights
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.operations.convert import convert
from marlinq.operations.inspect import inspect
from marlinq.operations.quantize import quantize
from tests.testing import faults
from tests.testing.original_folders import READ, save_tiny

LINEAR = "model.layers.0.mlp.up_proj"


def compressed(weight: Tensor) -> dict[str, Tensor]:
    """The three tensors of a 2:4 sparse weight [N, K], one bit at a time."""
    rows, masks = [], []
    for row in weight.tolist():
        kept: list[float] = []
        octets = [0] * -(-len(row) // 8)
        for start in range(0, len(row), 4):
            largest = sorted(range(start, start + 4), key=lambda k: (-abs(row[k]), k))[:2]
            for k in sorted(largest):
                kept.append(row[k])
                octets[k // 8] |= 1 << k % 8
        rows.append(kept)
        masks.append(octets)
    return {
        "compressed": torch.tensor(rows, dtype=weight.dtype),
        "bitmask": torch.tensor(masks, dtype=torch.uint8),
        "shape": torch.tensor(weight.shape).reshape(2, 1),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A pruned model, and the same as bitmasks."""
    root = tmp_path_factory.mktemp("bitmasks")
    dense = save_tiny("llama", root / "dense")
    tensors = load_file(dense / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = weight * TWO_OF_FOUR.largest(weight.abs().t()).t()
            stem = name.removesuffix(".weight")
            stored |= {f"{stem}.{suffix}": tensor for suffix, tensor in compressed(tensors[name]).items()}
        else:
            stored[name] = weight
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    masked = root / "masked"
    masked.mkdir()
    save_file(stored, masked / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "sparsity_config": {
            "format": "sparse-24-bitmask",
            "sparsity_structure": "2:4",
            "targets": ["Linear"],
        },
    }
    (masked / "config.json").write_text(json.dumps(config))
    return dense, masked


def test_weights_are_those_of_the_dense_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    dense, masked = folders
    expected = load_file(dense / "model.safetensors")
    found = with_dense_weights(Checkpoint.open(masked))
    assert set(found.tensors) == set(expected)
    for name, tensor in expected.items():
        assert found.tensors[name].shape == tuple(tensor.shape), name
        assert torch.equal(found.tensor(name), tensor), name
    report = convert(masked, tmp_path / "out", target_format="dense")
    assert report.source_format == "sparse-24-bitmask"
    assert report.converted == sum(name.endswith("_proj.weight") for name in expected)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert "not quantised" in inspect(masked).render()


def test_quantised_it_has_the_tensors_of_the_dense_model(folders: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = READ.replace(method="rtn", sparsity="2:4", format="compressed-tensors")
    outs = []
    for source in folders:
        quantize(source, tmp_path / source.name, recipe=recipe, device="cpu")
        outs.append(load_file(tmp_path / source.name / "model.safetensors"))
    assert set(outs[0]) == set(outs[1])
    assert all(torch.equal(outs[1][name], tensor) for name, tensor in outs[0].items())


def test_other_formats_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="16-bit weights as sparse-24-bitmask"):
        convert(folders[1], tmp_path / "out", target_format="gptq")


@pytest.mark.parametrize(
    ("suffix", "edit", "message"),
    [
        (
            "bitmask",
            lambda mask: mask | 1 << 7 - 3 | 15,
            "expected 2 kept weights of every 4, found 4 in row 0",
        ),
        ("bitmask", lambda mask: mask[:, :-1], r"bitmask: expected uint8 \[\d+, \d+\]"),
        ("shape", lambda shape: shape + 4, r"shape: expected \[\d+, \d+\] from compressed"),
        ("compressed", lambda kept: kept.to(torch.int32), "compressed: expected floats"),
    ],
)
def test_masks_and_shapes_that_contradict_are_named(
    folders: tuple[Path, Path],
    tmp_path: Path,
    suffix: str,
    edit: Callable[[Tensor], Tensor],
    message: str,
) -> None:
    name = f"{LINEAR}.{suffix}"
    (tmp_path / "copy").mkdir()
    for file in folders[1].iterdir():
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
    faults.change(tmp_path / "copy", name, edit)
    with pytest.raises(CheckpointError, match=message):
        with_dense_weights(Checkpoint.open(tmp_path / "copy")).tensor(f"{LINEAR}.weight")


def test_bits_past_the_end_of_a_row_are_refused(tmp_path: Path) -> None:
    tensors = {f"x.{suffix}": tensor for suffix, tensor in compressed(torch.randn(3, 12)).items()}
    tensors["x.bitmask"][1, 1] |= 1 << 6
    save_bitmasks(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=r"x\.bitmask: expected 12 channels in a row, found bits of"):
        with_dense_weights(Checkpoint.open(tmp_path)).tensor("x.weight")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x.compressed": None}, r"x\.compressed: missing"),
        ({"x.weight": torch.zeros(3, 12)}, r"x\.weight: stands beside x\.compressed"),
        ({"y.shape": torch.zeros(2)}, None),
    ],
)
def test_missing_and_doubled_weights_are_refused(
    tmp_path: Path, changes: dict[str, Tensor | None], message: str | None
) -> None:
    tensors = {f"x.{suffix}": tensor for suffix, tensor in compressed(torch.randn(3, 12)).items()}
    tensors |= {f"z.{suffix}": tensor for suffix, tensor in compressed(torch.randn(4, 8)).items()}
    found = {**tensors, **changes}
    save_bitmasks(tmp_path, {name: tensor for name, tensor in found.items() if tensor is not None})
    if message is None:
        assert set(with_dense_weights(Checkpoint.open(tmp_path)).tensors) == {
            "x.weight",
            "z.weight",
            "y.shape",
        }
        return
    with pytest.raises(CheckpointError, match=message):
        with_dense_weights(Checkpoint.open(tmp_path))


def save_bitmasks(folder: Path, tensors: dict[str, Tensor]) -> None:
    """A folder of these tensors whose config names the format."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"quantization_config": {"sparsity_config": {"format": "sparse-24-bitmask"}}}
    (folder / "config.json").write_text(json.dumps(config))
