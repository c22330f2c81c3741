"""Planted damage, in every layout where it can stand, with the manifest and without it.

Without the manifest most faults show in structure, names or values alone; :data:`NEEDS_ORIGINAL` lists the
others, which only a comparison with the original finds. A single exchanged word, or a single code of weights
that GPTQ moved about, is a warning there, and a failure with a manifest, like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from marlinq.checkpoint import Checkpoint
from marlinq.operations.verify import verify
from tests.testing import faults
from tests.testing.faults import SCALES, WORDS, ZEROS
from tests.testing.layouts import INTEGERS
from tests.testing.verified_checkpoints import save_original, save_quantized

VICTIM = "model.layers.0.mlp.up_proj"


@dataclass(frozen=True)
class Fault:
    """``plant(folder, layout)`` damages a copy; without a manifest one of ``found_by`` fails, or warns."""

    plant: Callable[[Path, str], None]
    found_by: frozenset[str]
    needs_original: bool = False
    warns: bool = False
    layouts: tuple[str, ...] = tuple(INTEGERS)
    options: tuple[tuple[str, object], ...] = ()


def _words(edit):
    return lambda folder, layout: faults.change(folder, f"{VICTIM}.{WORDS[layout]}", edit)


def _scales(edit):
    return lambda folder, layout: faults.change(folder, f"{VICTIM}.{SCALES[layout]}", edit)


def _zeros(by):
    return lambda folder, layout: faults.change(folder, f"{VICTIM}.{ZEROS[layout]}", faults.shift_zeros(by))


def _g_idx(folder, layout):
    faults.change(folder, f"{VICTIM}.g_idx", faults.swap_two_channels)


def _unquantize(folder, layout):
    n, k = 256, 128
    faults.unquantize(folder, VICTIM, torch.randn(n, k, generator=torch.Generator().manual_seed(0)).half())


GPTQS = ("gptq", "gptq-v2")
ASYMMETRIC = (("symmetric", False),)
SCATTERED = (("act_order", "scattered"),)
PLACES = frozenset({"words and groups", "weights"})
STRUCTURE = frozenset({"files", "config", "tensors"})

FAULTS = {
    "swapped nibbles": Fault(_words(faults.swap_nibbles), PLACES, needs_original=True),
    "swapped nibbles in one word": Fault(
        _words(faults.swap_nibbles_of_one_word),
        frozenset({"words and groups"}),
        needs_original=True,
        warns=True,
    ),
    "zeros one up, symmetric": Fault(_zeros(1), frozenset({"readable"}), layouts=(*GPTQS, "awq")),
    "zeros one down, symmetric": Fault(_zeros(-1), frozenset({"readable"}), layouts=(*GPTQS, "awq")),
    "zeros one up, asymmetric": Fault(
        _zeros(1),
        PLACES | {"readable"},
        needs_original=True,
        layouts=(*GPTQS, "awq", "compressed-tensors"),
        options=ASYMMETRIC,
    ),
    "zeros one down, asymmetric": Fault(
        _zeros(-1),
        PLACES | {"readable"},
        needs_original=True,
        layouts=(*GPTQS, "awq", "compressed-tensors"),
        options=ASYMMETRIC,
    ),
    "transposed scales": Fault(_scales(faults.transpose_scales), PLACES, needs_original=True),
    "transposed scales, shape too": Fault(_scales(torch.t), frozenset({"tensors"})),
    "shuffled g_idx, trivial": Fault(_g_idx, frozenset({"g_idx"}), layouts=GPTQS),
    "shuffled g_idx, activation order": Fault(
        _g_idx, frozenset({"words and groups"}), needs_original=True, layouts=GPTQS, options=SCATTERED
    ),
    "flipped sign of a scale": Fault(
        _scales(faults.flip_bit(15)), frozenset({"words and groups"}), needs_original=True
    ),
    **{
        f"flipped exponent bit {bit} of a scale": Fault(
            _scales(faults.flip_bit(bit)), frozenset({"words and groups"}), needs_original=True
        )
        for bit in (10, 11, 12)
    },
    # A scale of about 0.01 becomes about 1e-4 or about 500.
    "flipped exponent bit 13 of a scale": Fault(_scales(faults.flip_bit(13)), PLACES, needs_original=True),
    "flipped exponent bit 14 of a scale": Fault(_scales(faults.flip_bit(14)), frozenset({"scales"})),
    "missing tensor": Fault(
        lambda folder, layout: faults.remove_tensor(folder, f"{VICTIM}.{SCALES[layout]}"), STRUCTURE
    ),
    "missing words": Fault(
        lambda folder, layout: faults.remove_tensor(folder, f"{VICTIM}.{WORDS[layout]}"), STRUCTURE
    ),
    "missing norm": Fault(
        lambda folder, layout: faults.remove_tensor(folder, "model.layers.0.input_layernorm.weight"),
        STRUCTURE,
    ),
    "missing tensor, still in the index": Fault(
        lambda folder, layout: faults.remove_tensor(folder, f"{VICTIM}.{SCALES[layout]}", from_index=False),
        frozenset({"files"}),
    ),
    "duplicated tensor": Fault(
        lambda folder, layout: faults.duplicate_tensor(folder, f"{VICTIM}.{SCALES[layout]}"),
        frozenset({"files"}),
    ),
    "module left unquantised": Fault(_unquantize, frozenset({"coverage"})),
    "truncated shard": Fault(lambda folder, layout: faults.truncate_shard(folder), frozenset({"files"})),
}
FAULTS |= {
    "a code eight steps off": Fault(
        lambda folder, layout: faults.move_a_code(folder, VICTIM, layout),
        frozenset({"words and groups"}),
        needs_original=True,
        options=(("act_order", "rounded"),),
    ),
    "scales of another module": Fault(
        lambda folder, layout: faults.put_other(
            folder, f"{VICTIM}.{SCALES[layout]}", f"model.layers.0.mlp.gate_proj.{SCALES[layout]}"
        ),
        frozenset({"words and groups"}),
        needs_original=True,
    ),
}
for _kind, _options in (("", ()), (", asymmetric", ASYMMETRIC)):
    FAULTS[f"a scale 1.4 times as large{_kind}"] = Fault(
        _scales(faults.enlarge_a_scale(1.4)),
        frozenset({"words and groups"}),
        needs_original=True,
        layouts=("gptq", "compressed-tensors"),
        # GPTQ moves codes of these small layers so far that such a scale can't be told (docs/verify.md).
        options=(("act_order", "rounded"), *_options),
    )
FAULTS["a code eight steps off, asymmetric"] = replace(
    FAULTS["a code eight steps off"],
    layouts=("gptq", "compressed-tensors"),
    options=(("act_order", "rounded"), *ASYMMETRIC),
)
# Among codes that GPTQ moved it is a warning; how far those around it were moved differs with the place.
FAULTS["a code eight steps off among moved ones"] = replace(
    FAULTS["a code eight steps off"], layouts=("compressed-tensors",), options=ASYMMETRIC, warns=True
)
NEEDS_ORIGINAL = {name for name, fault in FAULTS.items() if fault.needs_original}


def in_some_layouts(count: int) -> list[Any]:
    """Every fault in every layout, slow but in ``count`` of them, in others with the next fault."""
    return [
        pytest.param(
            name, layout, marks=[] if (place - number) % len(fault.layouts) < count else pytest.mark.slow
        )
        for number, (name, fault) in enumerate(FAULTS.items())
        for place, layout in enumerate(fault.layouts)
    ]


def failed(report, status="failed"):
    return {check.name for check in report.checks if check.status == status}


def damaged(quantized, tmp_path, name, layout, *, manifest):
    fault = FAULTS[name]
    folder = faults.copy(quantized(layout, **dict(fault.options)), tmp_path / "copy", manifest=manifest)
    fault.plant(folder, layout)
    return folder


# A manifest knows digests: whose words they are of makes no difference to it.
@pytest.mark.parametrize(("name", "layout"), in_some_layouts(1))
def test_faults_are_found_with_a_manifest(quantized, tmp_path, name, layout):
    report = verify(damaged(quantized, tmp_path, name, layout, manifest=True))
    assert not report.ok
    assert failed(report) & {"manifest", "files"}, report.render()


@pytest.mark.parametrize(("name", "layout"), in_some_layouts(1))
def test_faults_are_found_without_a_manifest(original, quantized, tmp_path, name, layout):
    fault = FAULTS[name]
    folder = damaged(quantized, tmp_path, name, layout, manifest=False)
    report = verify(folder, against=original if fault.needs_original else None)
    assert report.ok == fault.warns, report.render()
    assert failed(report, "warning" if fault.warns else "failed") & fault.found_by, report.render()
    if fault.warns:
        assert report.verdict.startswith("verified, ")
    # One module was damaged, and no other is blamed.
    blamed = {module.name for module in report.modules if module.problems}
    assert blamed <= {VICTIM}


def test_modules_that_are_judged_side_by_side_are_judged_the_same(original, quantized, tmp_path):
    folder = damaged(quantized, tmp_path, "swapped nibbles", "gptq", manifest=False)
    before = torch.get_num_threads()
    reports = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            reports.append(verify(folder, against=original, device="cpu"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    one, several = reports
    assert not one.ok
    assert several == one


@pytest.mark.parametrize("name", sorted(NEEDS_ORIGINAL))
def test_faults_listed_as_needing_the_original_need_it(quantized, tmp_path, name):
    layout = FAULTS[name].layouts[-1]
    assert verify(damaged(quantized, tmp_path, name, layout, manifest=False)).ok


def test_every_bit_is_seen_by_the_manifest(quantized, tmp_path):
    folder = faults.copy(quantized("marlin"), tmp_path / "copy", manifest=True)
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    generator = torch.Generator().manual_seed(0)
    start = faults.header_bytes(shard)
    for place in torch.randint(start * 8, len(data) * 8, (4,), generator=generator).tolist():
        data[place // 8] ^= 1 << place % 8
        shard.write_bytes(data)
        assert "manifest" in failed(verify(folder))
        data[place // 8] ^= 1 << place % 8


def test_unquantised_tensor_changed(original, quantized, tmp_path):
    folder = faults.copy(quantized("gptq"), tmp_path / "copy", manifest=False)
    faults.change(folder, "model.norm.weight", faults.flip_bit(0))
    assert failed(verify(folder, against=original)) == {"unquantised tensors"}


def test_quantize_config_out_of_step(quantized, tmp_path):
    folder = faults.copy(quantized("gptq"), tmp_path / "copy", manifest=True)
    path = folder / "quantize_config.json"
    path.write_text(path.read_text().replace('"group_size": 32', '"group_size": 64'))
    report = verify(folder)
    assert failed(report) == {"config"}
    assert any("group_size is 64, config.json says 32" in check.detail for check in report.checks)


def test_stray_tensors(quantized, tmp_path):
    folder = faults.copy(quantized("gptq"), tmp_path / "copy", manifest=False)
    faults.add_tensor(folder, f"{VICTIM}.weight", torch.zeros(256, 128))
    assert failed(verify(folder)) == {"config"}
    folder = faults.copy(quantized("gptq"), tmp_path / "other", manifest=False)
    faults.add_tensor(folder, "model.surprise", torch.zeros(2))
    report = verify(folder)
    assert failed(report) == {"tensors", "loads"}
    assert "model.surprise" in next(check.detail for check in report.checks if check.name == "tensors")


def test_blank_codes(quantized, tmp_path):
    folder = faults.copy(quantized("gptq"), tmp_path / "copy", manifest=False)
    faults.change(folder, f"{VICTIM}.qweight", torch.zeros_like)
    assert failed(verify(folder)) == {"codes"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_impossible_scales_are_found(original, quantized, tmp_path, value):
    def put(scales):
        scales[0, 0] = value
        return scales

    folder = faults.copy(quantized("gptq"), tmp_path / "copy", manifest=False)
    faults.change(folder, f"{VICTIM}.scales", put)
    report = verify(folder)
    assert failed(report) == {"scales"}
    assert failed(verify(folder, against=original)) >= {"scales"}


def test_siblings_stand_in_for_an_unknown_architecture(tmp_path):
    original = save_original(tmp_path / "original", layers=2)
    whole = save_quantized(original, tmp_path / "gptq", "gptq", act_order="rounded")
    folder = faults.copy(whole, tmp_path / "copy", manifest=False)
    _unquantize(folder, "gptq")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "no-such-model"'))
    report = verify(folder)
    assert failed(report) == {"coverage", "loads"}
    assert "same module is quantised in 1 other block" in report.render()
    assert next(check for check in report.checks if check.name == "tensors").status == "warning"
    assert Checkpoint.open(folder).config["model_type"] == "no-such-model"
