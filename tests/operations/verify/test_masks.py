"""Damage planted into 2:4 sparse checkpoints: found by their masks, their manifest or the original."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from marlinq.checkpoint import MANIFEST
from marlinq.core.sparsity import TWO_OF_FOUR
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.verify import VerificationReport, verify
from marlinq.operations.verify.masks import Masks
from tests.testing import faults
from tests.testing.schemes import scheme

VICTIM = "model.layers.0.mlp.up_proj"
K, N = 128, 256


@pytest.fixture
def sparse(quantized: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda layout: quantized(layout, sparse=True)


def failed(report: VerificationReport) -> set[str]:
    return {check.name for check in report.checks if check.status == "failed"}


def places_of(row: int) -> list[int]:
    """Where the mask words of an output channel lie in the flat tensor, in the order of channels."""
    found = []
    for word in range(K // 16):
        line = 64 * (row // 64) + 2 * (row % 2) + row % 8 // 4 + 32 * (row % 4 // 2) + 4 * (row % 64 // 8)
        column = word
        if line % 2 == 0 and column % 2 == 1:
            line, column = line + 1, column - 1
        elif line % 2 == 1 and column % 2 == 0:
            line, column = line - 1, column + 1
        found.append(column // 2 * 2 * N + 2 * line + column % 2)
    return found


def swapped_places(mask: Tensor) -> Tensor:
    """One descriptor names its two places in the wrong order."""
    word = int(mask[0, 0])
    first, second = word & 3, word >> 2 & 3
    edited = mask.clone()
    edited[0, 0] = word ^ (first | second << 2) ^ (second | first << 2)
    return edited


def same_place_twice(mask: Tensor) -> Tensor:
    """One descriptor names its first place twice."""
    word = int(mask[0, 0])
    edited = mask.clone()
    edited[0, 0] = word ^ (word & 12) ^ (word & 3) << 2
    return edited


def neighbours(rows: range) -> Callable[[Tensor], Tensor]:
    """Output channels have the masks of those behind them."""

    def edit(mask: Tensor) -> Tensor:
        edited, flat = mask.flatten().clone(), mask.flatten()
        for row in rows:
            edited[places_of(row)] = flat[places_of((row + 1) % N)]
        return edited.reshape(mask.shape)

    return edit


def swapped_pairs(words: Tensor) -> Tensor:
    """The two kept codes of every span exchanged, under a mask that is right."""
    # Elements j and j + 1 are the two; they lie 16 bits apart.
    octets = words.contiguous().view(torch.int16).reshape(-1, 2).flip(1)
    return octets.reshape(-1).view(torch.int32).reshape(words.shape)


@pytest.mark.parametrize(
    ("nonzero", "pruned", "inferred"),
    [(0.01, False, None), (0.03, False, None), (0.01, True, None), (1.0, True, TWO_OF_FOUR)],
)
def test_few_codes_that_are_not_zero_tell_of_no_pattern(
    tmp_path: Path, nonzero: float, pruned: bool, inferred: object
) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, K, generator=generator)
    weight[torch.rand(weight.shape, generator=generator) > nonzero] = 0.0
    q = round_to_nearest(weight, scheme(-1, sparsity=TWO_OF_FOUR if pruned else None))
    folder: Any = SimpleNamespace(path=tmp_path)
    if not pruned and TWO_OF_FOUR.refusal(q.used()) is not None:
        pytest.fail("choose another seed, with which the codes follow the pattern by chance")
    assert Masks(folder).module("m", replace(q, sparsity=None)).sparsity == inferred


@pytest.mark.parametrize("edit", [swapped_places, same_place_twice])
def test_places_out_of_order_cannot_be_read(
    sparse: Callable[[str], Path], tmp_path: Path, edit: Callable[[Tensor], Tensor]
) -> None:
    folder = faults.copy(sparse("marlin-24"), tmp_path / "copy", manifest=False)
    faults.change(folder, f"{VICTIM}.meta", edit)
    report = verify(folder)
    assert failed(report) == {"readable"}
    assert f"{VICTIM}: meta: 1 of {K // 4 * N} descriptors" in report.render()


def test_masks_of_neighbouring_channels_belong_to_other_codes(
    sparse: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = faults.copy(sparse("marlin-24"), tmp_path / "copy", manifest=False)
    faults.change(folder, f"{VICTIM}.meta", neighbours(range(N)))
    report = verify(folder)
    assert failed(report) == {"round trip"}
    assert f"{VICTIM}.meta: unpacking and packing again changes its bits" in report.render()


@pytest.mark.parametrize("row", [0, 37, 200])
def test_one_channel_with_its_neighbours_mask(
    original: Path, sparse: Callable[[str], Path], tmp_path: Path, row: int
) -> None:
    """A channel of 128 weights may have no zero among those that are kept: the original tells."""
    folder = faults.copy(sparse("marlin-24"), tmp_path / "copy", manifest=False)
    faults.change(folder, f"{VICTIM}.meta", neighbours(range(row, row + 1)))
    report = verify(folder, against=original)
    assert "weights" in failed(report)
    assert f"1 of {N} output channels point elsewhere than the original's (channel {row} " in report.render()


def test_kept_codes_exchanged(original: Path, sparse: Callable[[str], Path], tmp_path: Path) -> None:
    folder = faults.copy(sparse("marlin-24"), tmp_path / "copy", manifest=False)
    faults.change(folder, f"{VICTIM}.weight_packed", swapped_pairs)
    assert failed(verify(folder, against=original)) & {"weights", "words and groups", "round trip"}


@pytest.mark.parametrize("suffix", ["meta", "weight_packed", "scale_packed"])
def test_with_a_manifest_every_bit_is_found(
    sparse: Callable[[str], Path], tmp_path: Path, suffix: str
) -> None:
    folder = faults.copy(sparse("marlin-24"), tmp_path / "copy", manifest=True)
    faults.change(folder, f"{VICTIM}.{suffix}", faults.flip_bit(5))
    assert "manifest" in failed(verify(folder))


def test_three_of_four_kept_in_a_dense_layout(sparse: Callable[[str], Path], tmp_path: Path) -> None:
    folder = faults.copy(sparse("compressed-tensors"), tmp_path / "copy", manifest=True)
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["run"] = {f"module {VICTIM}": {"sparsity": "2:4"}}
    path.write_text(json.dumps(manifest))
    passed = next(check for check in verify(folder).checks if check.name == "sparsity")
    assert passed.status == "passed"

    def third(words: Tensor) -> Tensor:
        """Every code of one word is another than the zero point."""
        edited = words.clone()
        edited[3, 5] = 0x11111111
        return edited

    faults.change(folder, f"{VICTIM}.weight_packed", third)
    report = verify(folder)
    assert failed(report) == {"sparsity", "manifest"}
    assert (
        "2 of 8192 spans of 4 input channels have more than 2 weights, first output channel 3"
        in report.render()
    )


@pytest.mark.parametrize("layout", ["marlin-24", "gptq-marlin-24", "compressed-tensors"])
def test_sound_folders_pass(original: Path, sparse: Callable[[str], Path], layout: str) -> None:
    report = verify(sparse(layout), against=original)
    assert not [check for check in report.checks if check.status in ("failed", "warning")]
