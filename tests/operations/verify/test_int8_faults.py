"""Faults planted in 8-bit integers, in every format that holds them: none is missed, clean ones pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.recipe import Recipe
from tests.testing.faults import SCALES, WORDS, ZEROS, passes, planted
from tests.testing.pairs import slow_but
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model

DOWN = "model.layers.0.mlp.down_proj"
ATTENTION = Override("self_attn", skip=True)
"""Weights that stay dense: all faults are of ``DOWN``, and two linears beside it are enough to be right."""
FORMS = ("gptq", "gptq-v2", "compressed-tensors")
CASES = [(form, symmetric) for form in FORMS for symmetric in (True, False)]
Tensors = dict[str, Tensor]
Plant = Callable[[Tensors, str], None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool] | None, Path]:
    """A clean checkpoint of every case, and the original under None."""
    root = tmp_path_factory.mktemp("int8")
    model = tiny_model(
        "llama", seed=3, vocab_size=320, hidden_size=192, intermediate_size=256, num_hidden_layers=1
    )
    original = save_plain(root / "original", model)
    save_tokenizer(original)
    found: dict[tuple[str, bool] | None, Path] = {None: original}
    for form, symmetric in CASES:
        recipe = Recipe(
            method="rtn",
            scheme="int8",
            format=form,
            symmetric=symmetric,
            group_size=64,
            overrides=(ATTENTION,),
        )
        out = root / f"{form}-{symmetric}"
        quantize(original, out, recipe=recipe, device="cpu", progress=False)
        (out / "marlinq.json").unlink()  # whose hashes would find anything
        found[form, symmetric] = out
    return found


def of(names: dict[str, str], change: Callable[[Tensor], Tensor]) -> Plant:
    """A change of one tensor of the damaged module."""

    def plant(tensors: Tensors, form: str) -> None:
        name = f"{DOWN}.{names[form]}"
        tensors[name] = change(tensors[name]).contiguous()

    return plant


def missing(tensors: Tensors, form: str) -> None:
    del tensors[f"{DOWN}.{SCALES[form]}"]


def of_one(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of the last element alone."""

    def edit(stored: Tensor) -> Tensor:
        flat = stored.clone().flatten()
        flat[-1] = change(flat[-1])
        return flat.reshape(stored.shape)

    return edit


def of_bytes(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A change of words as bytes [..., 4]."""

    def edit(words: Tensor) -> Tensor:
        changed = change(words.contiguous().view(torch.uint8).reshape(*words.shape, 4))
        return changed.contiguous().view(torch.int32).reshape(words.shape)

    return edit


def turned(scales: Tensor) -> Tensor:
    """Values in the order of the other axis under the right shape, as a mistaken reader leaves them."""
    return scales.t().reshape(scales.shape)


FAULTS: dict[str, Plant] = {
    "scales missing": missing,
    "scales turned over": of(SCALES, torch.reciprocal),
    "scales zero": of(SCALES, torch.zeros_like),
    "a scale is NaN": of(SCALES, of_one(lambda scale: scale * torch.nan)),
    "one scale twice what it was": of(SCALES, of_one(lambda scale: 2 * scale)),
    "scales transposed": of(SCALES, turned),
    "bytes in the reverse order": of(WORDS, of_bytes(lambda four: four.flip(-1))),
    "codes of two's complement": of(WORDS, of_bytes(lambda four: four ^ 0x80)),
    "nibbles exchanged": of(WORDS, of_bytes(lambda four: four << 4 | four >> 4)),
    "one code half the range off": of(WORDS, of_one(lambda word: word ^ 0x80)),
    "words of another order": of(WORDS, turned),
}
ZERO_FAULTS: dict[str, Plant] = {
    "zero points one up": of(ZEROS, lambda words: words + 0x01010101),
    "zero points of two's complement": of(ZEROS, of_bytes(lambda four: four ^ 0x80)),
}


@pytest.mark.parametrize("case", slow_but(CASES, ("gptq", True), ("compressed-tensors", False)))
def test_no_fault_is_missed(
    folders: dict[tuple[str, bool] | None, Path], tmp_path: Path, case: tuple[str, bool]
) -> None:
    form, symmetric = case
    original, clean = folders[None], folders[case]
    assert passes(clean, original)
    missed = []
    for name, plant in (FAULTS if symmetric else FAULTS | ZERO_FAULTS).items():
        if passes(planted(clean, tmp_path / name, partial(plant, form=form)), original):
            missed.append(name)
    assert not missed
