"""Faults planted in every float scheme and container: none is missed, and what is clean passes.

``gpt-oss`` and ``deepseek-v4``, each of one family of models, are in tests/operations/test_stacked_experts.py
and test_deepseek_v4.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from marlinq.core.schemes import SCHEMES
from marlinq.formats import FORMATS
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.verify import verify
from tests.docs.test_format_tables import INTEGERS, example
from tests.testing.faults import passes, planted
from tests.testing.foreign_floats import Tensors, as_gptqmodel, config_of, rewrite, with_four_bit_inputs
from tests.testing.pairs import every_value, slow_but
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model

DOWN = "model.layers.0.mlp.down_proj"
ATTENTION = Override("self_attn", skip=True)
"""Weights that stay dense: faults are of ``DOWN``, and two linears beside it are enough to be right."""
WRITTEN = (
    ("fp8", "compressed-tensors"),
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
INVERSE = "gptqmodel-fp8"
FOUR_BIT_INPUTS = "nvfp4-a4"
MADE = {
    ("fp8", INVERSE): ("fp8", "compressed-tensors"),
    ("fp8-block", INVERSE): ("fp8-block", "fp8"),
    (FOUR_BIT_INPUTS, "compressed-tensors"): ("nvfp4", "compressed-tensors"),
    (FOUR_BIT_INPUTS, "modelopt"): ("nvfp4", "modelopt"),
}
"""Cases that are read alone, and those that they are made of: GPTQModel's FP8, whose scales divide, and NVFP4
with scales for activations of 4 bits."""
CASES = (*WRITTEN, *MADE)
INPUTS = ("input_scale", "activation_scale", "input_global_scale")
FLOATS = [name for name in SCHEMES if name not in INTEGERS]


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
    for scheme, form in WRITTEN:
        recipe = Recipe(
            method="rtn",
            scheme=scheme,
            format=form,
            calibration=str(text),
            samples=1,
            max_length=32,
            overrides=(ATTENTION,),
        )
        out = root / f"{scheme}-{form}"
        quantize(original, out, recipe=recipe, device="cpu", progress=False)
        (out / "marlinq.json").unlink()  # whose hashes would find anything
        found[scheme, form] = out
    for case, source in MADE.items():
        found[case] = root / "-".join(case)
        shutil.copytree(found[source], found[case])
        (as_gptqmodel if case[1] == INVERSE else with_four_bit_inputs)(found[case])
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
    stored = tensors[scales_of(tensors)]
    width = stored.element_size()
    rows = stored.view(torch.uint8).reshape(*stored.shape, width)
    turned = rows.transpose(0, 1).reshape(rows.shape).flatten(1).contiguous()
    tensors[scales_of(tensors)] = turned.view(stored.dtype).reshape(stored.shape)


def second_turned_over(tensors: Tensors) -> None:
    for suffix in ("weight_global_scale", "weight_scale_2"):
        if f"{DOWN}.{suffix}" in tensors:
            tensors[f"{DOWN}.{suffix}"] = tensors[f"{DOWN}.{suffix}"].reciprocal()


def without_last_block(tensors: Tensors) -> None:
    tensors[scales_of(tensors)] = tensors[scales_of(tensors)][:, :-1].contiguous()


def inputs_of(tensors: Tensors) -> str:
    return next(name for name in (f"{DOWN}.{suffix}" for suffix in INPUTS) if name in tensors)


def inputs_missing(tensors: Tensors) -> None:
    del tensors[inputs_of(tensors)]


def inputs_are(value: float) -> Callable[[Tensors], None]:
    """The scale of activations is ``value``."""

    def plant(tensors: Tensors) -> None:
        tensors[inputs_of(tensors)] = torch.full_like(tensors[inputs_of(tensors)], value)

    return plant


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
_FP4 = {"nibbles exchanged": nibbles_exchanged, "FP4 as FP8": fp4_bytes_as_fp8}
_INPUTS = {
    "input scale missing": inputs_missing,
    "input scale zero": inputs_are(0.0),
    "input scale NaN": inputs_are(torch.nan),
}
_TWO_AXES = {"scales transposed": transposed, "last scales missing": without_last_block}
_SECOND = {"second level turned over": second_turned_over}
FAULTS: dict[str, dict[str, Callable[[Tensors], None]]] = {
    "fp8": {},
    "fp8-dynamic": {},
    "fp8-static": _INPUTS,
    "fp8-block": _TWO_AXES,
    "mxfp8": _TWO_AXES,
    "mxfp4": _TWO_AXES | _FP4,
    "nvfp4": _TWO_AXES | _FP4 | _SECOND,
    FOUR_BIT_INPUTS: _TWO_AXES | _FP4 | _SECOND | _INPUTS,
}
"""Faults that not every scheme can have, by scheme."""


def faults(scheme: str) -> dict[str, Callable[[Tensors], None]]:
    found = EVERY | FAULTS[scheme]
    if "fp8" in scheme:
        found = found | {"code is NaN": nan_code}  # E2M1 has none
    if not scheme.startswith("mx"):
        found = found | {"scales zero": of_scales(torch.zeros_like)}  # E8M0 has none
    return found


def test_every_scheme_and_container_is_here() -> None:
    """So that a new one can't be forgotten."""
    for form in FORMATS.values():
        if form.sparsity is not None or form.name in ("gpt-oss", "deepseek-v4"):
            continue
        if form.read_only is not None:
            assert any(case[1] == form.name for case in MADE), form.name
            continue
        held = {name for name in FLOATS if form.scheme_refusal(SCHEMES[name].example(example(name))) is None}
        assert held == {scheme for scheme, container in WRITTEN if container == form.name}, form.name


# Every time: each scheme and each container.
@pytest.mark.parametrize(("scheme", "form"), every_value(CASES))
def test_no_fault_is_missed(
    folders: dict[tuple[str, str] | None, Path], tmp_path: Path, scheme: str, form: str
) -> None:
    original, case = folders[None], (scheme, form)
    assert passes(folders[case], original)
    missed = []
    for name, plant in faults(scheme).items():
        if passes(planted(folders[case], tmp_path / name, plant), original):
            missed.append(name)
    assert not missed


@pytest.mark.parametrize(
    ("case", "plant"),
    [
        (("fp8-block", "fp8"), turned_over),
        (("fp8-block", INVERSE), turned_over),
        (("nvfp4", "compressed-tensors"), second_turned_over),
        (("nvfp4", "modelopt"), second_turned_over),
    ],
)
def test_weights_that_no_model_has_need_no_original(
    folders: dict[tuple[str, str] | None, Path],
    tmp_path: Path,
    case: tuple[str, str],
    plant: Callable[[Tensors], None],
) -> None:
    assert verify(folders[case], device="cpu", progress=False).ok
    report = verify(planted(folders[case], tmp_path / "faulty", plant), device="cpu", progress=False)
    (row,) = [check for check in report.checks if check.name == "scales"]
    assert row.status == "failed"
    assert f"{DOWN}: " in row.detail


def other_config(case: tuple[str, str]) -> tuple[str, str]:
    """A case whose config says another scheme of the same container, or whose scales mean the reverse."""
    container = "fp8" if case[1] == INVERSE else case[1]
    # These two differ in what servers do with activations alone.
    alike = {case[0], *({"fp8", "fp8-dynamic"} if case[0] in ("fp8", "fp8-dynamic") else ())}
    return next(each for each in WRITTEN if each[1] == container and each[0] not in alike)


@pytest.mark.parametrize(
    "case", slow_but(CASES, ("mxfp4", "compressed-tensors"), ("fp8-block", INVERSE), ("nvfp4", "modelopt")),
    ids="-".join,
)  # fmt: skip
def test_the_scheme_of_another_group_is_found(
    folders: dict[tuple[str, str] | None, Path], tmp_path: Path, case: tuple[str, str]
) -> None:
    faulty = tmp_path / "faulty"
    shutil.copytree(folders[case], faulty)
    rewrite(faulty, config_of(folders[other_config(case)]), load_file(faulty / "model.safetensors"))
    assert not passes(faulty, folders[None])


@pytest.mark.parametrize("inverse", [False, True])
def test_the_two_meanings_of_one_name_are_told_apart(
    folders: dict[tuple[str, str] | None, Path], tmp_path: Path, inverse: bool
) -> None:
    """``weight_scale_inv`` multiplies in one container and divides in another, as the config alone says."""
    faulty = tmp_path / "faulty"
    shutil.copytree(folders["fp8-block", INVERSE if inverse else "fp8"], faulty)
    config = config_of(faulty)
    if inverse:
        del config["weight_scale_semantics"]
    else:
        config["weight_scale_semantics"] = "inverse"
    rewrite(faulty, config, load_file(faulty / "model.safetensors"))
    assert not passes(faulty, folders[None])
