"""Marlin-24 to the dense layouts and back; what is not 2:4 sparse is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.operations.convert import convert
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.recipe import Recipe
from tests.testing import faults
from tests.testing.quantized_folders import (
    assert_holds,
    assert_same_tensors,
    model_tuples,
    opened,
    random_tuple,
    write,
)
from tests.testing.runnable_folders import save_plain
from tests.testing.tiny_models import tiny_model


@pytest.mark.parametrize("layout", ["gptq", "gptq-v2", "awq", "marlin", "compressed-tensors"])
@pytest.mark.parametrize("sparse", ["marlin-24", "gptq-marlin-24"])
def test_zeros_are_codes_and_back(tmp_path: Path, layout: str, sparse: str) -> None:
    modules = model_tuples(group_size=64, sparse=True)
    dense = write(tmp_path / "dense", layout, modules)
    there, back = tmp_path / "there", tmp_path / "back"
    convert(dense, there, target_format=sparse)
    assert_holds(there, sparse, modules)
    assert all(spec.scheme.sparsity == TWO_OF_FOUR for spec in opened(there).modules.values())
    convert(there, back, target_format=layout)
    assert_same_tensors(dense, back)


def test_words_of_one_sparse_format_convert_to_the_other(tmp_path: Path) -> None:
    modules = model_tuples(group_size=32, bits=8, sparse=True)
    convert(write(tmp_path / "a", "gptq", modules), tmp_path / "b", target_format="marlin-24")
    convert(tmp_path / "b", tmp_path / "c", target_format="gptq-marlin-24")
    assert_holds(tmp_path / "c", "gptq-marlin-24", modules)


def test_a_dense_module_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    modules = model_tuples(sparse=True)
    name = "model.layers.1.mlp.up_proj"
    modules[name] = random_tuple(128, 256, 5)
    source = write(tmp_path / "dense", "compressed-tensors", modules)
    with pytest.raises(
        ConversionRefused, match=rf"{name}: marlin-24 holds 2:4 sparse weights only, and \d+ of"
    ):
        convert(source, tmp_path / "out", target_format="marlin-24")
    assert not list(tmp_path.glob("out*"))


def test_a_damaged_mask_is_found_before_anything_is_written(tmp_path: Path) -> None:
    source = write(tmp_path / "dense", "gptq", model_tuples(sparse=True))
    convert(source, tmp_path / "sparse", target_format="marlin-24")
    faults.change(tmp_path / "sparse", "model.layers.1.mlp.up_proj.meta", lambda mask: mask ^ 1)
    with pytest.raises(CheckpointError, match=r"mlp.up_proj: meta: \d+ of \d+ descriptors"):
        convert(tmp_path / "sparse", tmp_path / "out", target_format="gptq")
    assert not list(tmp_path.glob("out*"))


def test_vllms_kernel_takes_fewer_shapes(tmp_path: Path) -> None:
    source = write(tmp_path / "dense", "gptq", model_tuples(group_size=128, sparse=True))
    with pytest.raises(ConversionRefused, match="N=64 to be multiples of 128"):
        convert(source, tmp_path / "out", target_format="marlin-24", strict_marlin=True)


@pytest.mark.parametrize("target", ["marlin-24", "gptq-marlin-24"])
def test_floats_are_not_asked_to_be_sparse(tmp_path: Path, target: str) -> None:
    save_plain(tmp_path / "original", tiny_model("llama", num_hidden_layers=1))
    recipe = Recipe(scheme="mxfp4", format="compressed-tensors", method="rtn")
    quantize(tmp_path / "original", tmp_path / "made", recipe=recipe, device="cpu")
    with pytest.raises(ConversionRefused, match="integers and floats are never converted into each other"):
        convert(tmp_path / "made", tmp_path / "out", target_format=target)
