"""Faults planted in every float scheme and container: none is missed, and what is clean passes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from marlinq.core.errors import MarlinqError
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.verify import verify
from tests.testing.pairs import every_value
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model

DOWN = "model.layers.0.mlp.down_proj"
CASES = (
    ("fp8-dynamic", "compressed-tensors"),
    ("fp8-static", "compressed-tensors"),
    ("fp8-static", "fp8"),
    ("fp8-static", "modelopt"),
    ("fp8-block", "compressed-tensors"),
    ("fp8-block", "fp8"),
    ("mxfp8", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
    ("nvfp4", "compressed-tensors"),
    ("nvfp4", "modelopt"),
)
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str] | None, Path]:
    """A clean checkpoint of every case, and the original under None. Blocks are ragged, and not square."""
    root = tmp_path_factory.mktemp("faults")
    model = tiny_model(
        "llama", seed=3, vocab_size=320, hidden_size=192, intermediate_size=288, num_hidden_layers=1
    )
    with torch.no_grad():
        # Blocks of random weights have nearly the same scales; those of trained ones don't.
        for name, weight in model.named_parameters():
            if name.endswith("_proj.weight"):
                weight[:128] *= 2
                weight[:, 128:] *= 0.7
    original = save_plain(root / "original", model)
    save_tokenizer(original)
    text = root / "text.txt"
    text.write_text("It is a truth universally acknowledged, that numbers are rounded.\n" * 20)
    found: dict[tuple[str, str] | None, Path] = {None: original}
    for scheme, form in CASES:
        recipe = Recipe(
            method="rtn", scheme=scheme, format=form, calibration=str(text), samples=1, max_length=32
        )
        out = root / f"{scheme}-{form}"
        quantize(original, out, recipe=recipe, device="cpu", progress=False)
        (out / "marlinq.json").unlink()  # whose hashes would find anything
        found[scheme, form] = out
    return found


def scales_of(tensors: Tensors) -> str:
    names = ("weight_scale_inv", "weight_scale")
    return next(f"{DOWN}.{name}" for name in names if f"{DOWN}.{name}" in tensors)


def codes_of(tensors: Tensors) -> str:
    return next(f"{DOWN}.{name}" for name in ("weight_packed", "weight") if f"{DOWN}.{name}" in tensors)


def of_scales(change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    """A fault of the stored scales, as numbers."""

    def plant(tensors: Tensors) -> None:
        name = scales_of(tensors)
        stored = tensors[name]
        if stored.dtype == torch.uint8:
            wide = change(stored.view(torch.float8_e8m0fnu).float())
            tensors[name] = wide.to(torch.float8_e8m0fnu).view(torch.uint8)
        else:
            tensors[name] = change(stored.float()).to(stored.dtype)

    return plant


def turned_over(tensors: Tensors) -> None:
    of_scales(torch.reciprocal)(tensors)


def one_nan(scales: Tensor) -> Tensor:
    flat = scales.clone().reshape(-1)
    flat[0] = torch.nan
    return flat.reshape(scales.shape)


def exponents_off_by_the_bias(tensors: Tensors) -> None:
    name = scales_of(tensors)
    if tensors[name].dtype != torch.uint8:
        tensors[name] = (tensors[name].float() * 2.0**7).to(tensors[name].dtype)
    else:
        tensors[name] = tensors[name] - 7


def missing(tensors: Tensors) -> None:
    del tensors[scales_of(tensors)]


def nibbles_exchanged(tensors: Tensors) -> None:
    stored = tensors[codes_of(tensors)]
    tensors[codes_of(tensors)] = (stored << 4) | (stored >> 4)


def fp4_bytes_as_fp8(tensors: Tensors) -> None:
    tensors[codes_of(tensors)] = tensors[codes_of(tensors)].view(torch.float8_e4m3fn)


def transposed(tensors: Tensors) -> None:
    """Values in the order of the other axis under the right shape, as a mistaken reader leaves them."""
    name = scales_of(tensors)
    tensors[name] = tensors[name].float().t().reshape(tensors[name].shape).to(tensors[name].dtype)


def second_turned_over(tensors: Tensors) -> None:
    for suffix in ("weight_global_scale", "weight_scale_2"):
        if f"{DOWN}.{suffix}" in tensors:
            tensors[f"{DOWN}.{suffix}"] = tensors[f"{DOWN}.{suffix}"].reciprocal()


def without_last_block(tensors: Tensors) -> None:
    tensors[scales_of(tensors)] = tensors[scales_of(tensors)][:, :-1].contiguous()


def inputs_missing(tensors: Tensors) -> None:
    for suffix in ("input_scale", "activation_scale"):
        tensors.pop(f"{DOWN}.{suffix}", None)


def inputs_zero(tensors: Tensors) -> None:
    for suffix in ("input_scale", "activation_scale"):
        if f"{DOWN}.{suffix}" in tensors:
            tensors[f"{DOWN}.{suffix}"] = torch.zeros_like(tensors[f"{DOWN}.{suffix}"])


def one_bit(tensors: Tensors) -> None:
    """The sign of a code: of the low nibble where a byte holds two."""
    name = codes_of(tensors)
    codes = tensors[name].view(torch.uint8).clone()
    place = divmod(int((codes & 0x7).argmax()), codes.shape[1])
    codes[place] ^= 0x08 if tensors[name].dtype == torch.uint8 else 0x80
    tensors[name] = codes.view(tensors[name].dtype)


def twice_in_one_place(scales: Tensor) -> Tensor:
    flat = scales.clone().reshape(-1)
    flat[-1] *= 2
    return flat.reshape(scales.shape)


def nan_code(tensors: Tensors) -> None:
    name = codes_of(tensors)
    codes = tensors[name].view(torch.uint8).clone()
    codes[5, 7] = 0x7F
    tensors[name] = codes.view(tensors[name].dtype)


EVERY: dict[str, Callable[[Tensors], None]] = {
    "scales turned over": turned_over,
    "a scale is NaN": of_scales(one_nan),
    "scales missing": missing,
    "exponents off by the bias": exponents_off_by_the_bias,
    "one bit of a code": one_bit,
    "one scale twice what it was": of_scales(twice_in_one_place),
}
FAULTS = {
    "fp8": {"code is NaN": nan_code},
    "fp8-static": {"input scale missing": inputs_missing, "input scale zero": inputs_zero},
    "fp8-block": {"block scales transposed": transposed, "last block missing": without_last_block},
    "mxfp4": {"nibbles exchanged": nibbles_exchanged, "FP4 as FP8": fp4_bytes_as_fp8},
    "nvfp4": {
        "nibbles exchanged": nibbles_exchanged,
        "FP4 as FP8": fp4_bytes_as_fp8,
        "second level turned over": second_turned_over,
    },
}


def faults(scheme: str, form: str) -> dict[str, Callable[[Tensors], None]]:
    found = EVERY | FAULTS.get(scheme, {}) | (FAULTS["fp8"] if "fp8" in scheme else {})
    if "mx" not in scheme:
        found = found | {"scales zero": of_scales(torch.zeros_like)}
    return found


def passes(folder: Path, original: Path) -> bool:
    """Whether verify finds nothing; a folder that can't be read is found faulty too."""
    try:
        return verify(folder, against=original, device="cpu", progress=False).ok
    except MarlinqError:
        return False


# Every time: each scheme and each container.
@pytest.mark.parametrize(("scheme", "form"), every_value(CASES))
def test_no_fault_is_missed(
    folders: dict[tuple[str, str] | None, Path], tmp_path: Path, scheme: str, form: str
) -> None:
    original, case = folders[None], (scheme, form)
    assert passes(folders[case], original)
    missed = []
    for name, plant in faults(*case).items():
        faulty = tmp_path / name
        shutil.copytree(folders[case], faulty)
        tensors = load_file(faulty / "model.safetensors")
        plant(tensors)
        save_file(tensors, faulty / "model.safetensors", {"format": "pt"})
        if passes(faulty, original):
            missed.append(name)
    assert not missed


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "compressed-tensors"], ids="-".join)
def test_the_scheme_of_another_group_is_found(
    folders: dict[tuple[str, str] | None, Path], tmp_path: Path, case: tuple[str, str]
) -> None:
    other = next(each for each in CASES if each[1] == case[1] and each[0] != case[0])
    faulty = tmp_path / "faulty"
    shutil.copytree(folders[case], faulty)
    config = json.loads((faulty / "config.json").read_text())
    groups = json.loads((folders[other] / "config.json").read_text())["quantization_config"]
    config["quantization_config"] = groups
    (faulty / "config.json").write_text(json.dumps(config))
    assert not passes(faulty, folders[None])
