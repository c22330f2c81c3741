"""Marlin-24 against its formula, one code at a time, and against itself; masks that can't be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import FORMATS, LAYOUTS, spec_of
from marlinq.formats.dialects import DIALECTS, Keys, write_quantization_config
from tests.formats.oracles import packed, words
from tests.testing.quantized_folders import random_tuple

NAMES = {"marlin-24": ("weight_packed", "meta", "scale_packed"), "gptq-marlin-24": ("B_24", "B_meta", "s")}
ROWS = (0, 1, 8, 9)
SLOTS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
SCALE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
# Places of a span with fewer than two values, by the places that have one.
FILLED = {(): (2, 3), (0,): (0, 2), (1,): (1, 2), (2,): (2, 3), (3,): (2, 3)}


def sparse(k: int, n: int, *, group_size: int = 32, bits: int = 4, seed: int = 0) -> QuantizedWeight:
    q = random_tuple(k, n, seed, group_size=group_size, bits=bits, sparse=True)
    # Spans with one value and with none, too.
    codes = q.codes.clone()
    codes[torch.rand(k, n, generator=torch.Generator().manual_seed(seed + 1)) < 0.3] = q.element.midpoint
    return replace(q, codes=codes, sparsity=TWO_OF_FOUR)


def formula(q: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Words, mask and scales, in plain Python."""
    k, n, bits = q.in_features, q.out_features, q.element.bits
    codes, zero = q.codes.tolist(), q.element.midpoint
    kept = [[0] * n for _ in range(k // 2)]
    descriptors = [[0] * n for _ in range(k // 4)]
    for span in range(k // 4):
        for column in range(n):
            used = tuple(p for p in range(4) if codes[4 * span + p][column] != zero)
            first, second = FILLED.get(used, used)
            descriptors[span][column] = first | second << 2
            kept[2 * span][column] = codes[4 * span + first][column]
            kept[2 * span + 1][column] = codes[4 * span + second][column]
    rows = []
    for kt in range(k // 32):
        row = []
        for nt in range(n // 64):
            for t in range(32):
                for part in range(4):
                    elements = [
                        kept[16 * kt + 2 * (t % 4) + ROWS[j % 4]][
                            64 * nt + 8 * (t // 4) + 4 * (j // 4) + part
                        ]
                        for j in range(8)
                    ]
                    count = 32 // bits
                    for half in range(8 // count):
                        mine = elements[half * count :][:count]
                        row.append(packed([mine[j] for j in SLOTS[bits]], bits))
        rows.append(row)
    mask = [0] * (k // 16 * n)
    for r in range(n):
        for c in range(k // 16):
            word = sum(descriptors[4 * c + part][r] << 4 * part for part in range(4))
            row = (
                64 * (r // 64) + 2 * (r % 2) + (r % 8) // 4 + 32 * (((r % 32) % 4) // 2) + 4 * ((r % 64) // 8)
            )
            column = c
            if row % 2 == 0 and column % 2 == 1:
                row, column = row + 1, column - 1
            elif row % 2 == 1 and column % 2 == 0:
                row, column = row - 1, column + 1
            mask[column // 2 * 2 * n + 2 * row + column % 2] = word - (1 << 16) * (word >= 1 << 15)
    scales = q.scales
    if q.groups > 1:
        order = [8 * (column // 8) + SCALE_ORDER[column % 8] for column in range(n)]
        scales = scales[:, order]
    return words(rows), torch.tensor(mask, dtype=torch.int16).reshape(k // 32, 2 * n), scales


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("k", "n", "group_size", "bits"),
    [(64, 64, 32, 4), (32, 128, -1, 4), (128, 64, 64, 8), (96, 64, -1, 8)],
)
def test_pack_holds_the_formula_and_unpack_undoes_it(
    name: str, k: int, n: int, group_size: int, bits: int
) -> None:
    layout, q = LAYOUTS[name], sparse(k, n, group_size=group_size, bits=bits)
    stored = layout.pack(q)
    for suffix, expected in zip(NAMES[name], formula(q), strict=True):
        assert stored[suffix].dtype == expected.dtype
        assert stored[suffix].is_contiguous()
        assert torch.equal(stored[suffix], expected), suffix
    assert set(stored) == set(NAMES[name])
    spec = replace(spec_of(q), scheme=layout.as_stored(q.scheme))
    assert layout.mismatch({}, spec) is not None
    shapes = {suffix: tuple(tensor.shape) for suffix, tensor in stored.items()}
    assert layout.infer_shape(shapes, q.element) == (k, n)
    back = layout.unpack(stored, spec)
    assert back.difference(q) is None
    assert back.scheme == q.scheme


def test_a_weight_has_one_encoding() -> None:
    """Kept zeros stand in fixed places, so mask and codes tell whether they belong together."""
    q = sparse(64, 64)
    layout = LAYOUTS["marlin-24"]
    stored = layout.pack(q)
    spec = spec_of(q)
    rolled = layout.unpack({**stored, "meta": _roll(stored["meta"], 64)}, spec)
    assert not torch.equal(layout.pack(rolled)["meta"], _roll(stored["meta"], 64))


@pytest.mark.parametrize("edit", [lambda mask: mask * 0, lambda mask: _swapped(mask)])
def test_places_that_do_not_ascend_are_refused(edit: Callable[[Tensor], Tensor]) -> None:
    q = sparse(64, 64)
    layout = LAYOUTS["marlin-24"]
    stored = layout.pack(q)
    with pytest.raises(CheckpointError, match="two ascending places"):
        layout.unpack({**stored, "meta": edit(stored["meta"])}, spec_of(q))


def test_refusals_name_the_value() -> None:
    layout = LAYOUTS["marlin-24"]
    q = sparse(64, 64)
    dense = random_tuple(64, 64, 1)
    asymmetric = random_tuple(64, 64, 1, zeros="one-up", sparse=True)
    for weight, message in (
        (dense, "dense weights"),
        (replace(dense, sparsity=TWO_OF_FOUR), "have more than 2 weights, first output channel 0"),
        (replace(asymmetric, sparsity=TWO_OF_FOUR), "asymmetric"),
        (sparse(48, 64, group_size=-1), "K=48 must be a multiple of 32"),
        (sparse(64, 96), "N=96 of 64"),
        (sparse(96, 64, group_size=48), "group size 48"),
    ):
        with pytest.raises(ConversionRefused, match=message):
            layout.pack(weight)
    assert "multiples of 128" in (layout.strict_refusal(spec_of(q)) or "")
    assert layout.strict_refusal(spec_of(sparse(128, 128, group_size=128))) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_config_says_what_is_sparse(name: str) -> None:
    form = FORMATS[name]
    modules = {"model.layers.0.a_proj": spec_of(sparse(128, 64, group_size=64))}
    if name == "marlin-24":
        modules["model.layers.0.b_proj"] = spec_of(random_tuple(128, 64, 1, group_size=64))
    raw = write_quantization_config(form, modules, ["lm_head"])
    config = DIALECTS[form.dialect].read(Keys(raw, "config.json"))
    assert config.format == name
    for module, spec in modules.items():
        found = config.rules.scheme(module)
        assert found is not None
        assert found.sparsity == spec.scheme.sparsity
    if name == "marlin-24":
        assert {group["format"] for group in raw["config_groups"].values()} == {"marlin-24", "pack-quantized"}
        # Old writers gave such checkpoints this config beside their format.
        said = {"format": "dense", "sparsity_structure": "2:4"}
        DIALECTS[form.dialect].read(Keys({**raw, "sparsity_config": said}, "config.json"))
    else:
        assert raw["checkpoint_format"] == "marlin_24"


def _roll(mask: Tensor, by: int) -> Tensor:
    return mask.flatten().roll(by).reshape(mask.shape)


def _swapped(mask: Tensor) -> Tensor:
    """The two places of the first descriptor of the first word exchanged."""
    word = int(mask[0, 0])
    first, second = word & 3, word >> 2 & 3
    edited = mask.clone()
    edited[0, 0] = word - (first | second << 2) + (second | first << 2)
    return edited
