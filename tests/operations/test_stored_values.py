"""Stored values that contradict the config get one answer, that of reading, from every command."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import marlinq
from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.errors import CheckpointError, NumericsError, UnsupportedError
from marlinq.methods.rtn import round_to_nearest
from marlinq.operations.convert import convert
from marlinq.operations.inspect import inspect
from marlinq.operations.quantize import quantize
from marlinq.operations.quantize.recipe import Override, Recipe
from marlinq.operations.rotate import rotate
from marlinq.operations.verify import verify
from marlinq.runtime import load
from tests.testing import faults
from tests.testing.draft_heads import add_draft_head
from tests.testing.foreign_floats import with_four_bit_inputs
from tests.testing.layouts import INTEGERS
from tests.testing.mixtures import save_mixture
from tests.testing.original_folders import RECIPE, ROWS, save_tiny
from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized
from tests.testing.schemes import scheme
from tests.testing.tiny_models import tiny_model

VICTIM = "model.layers.0.mlp.up_proj"


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def test_a_stored_head_wins_over_a_config_that_ties_it(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    tokens = torch.tensor([[3, 4, 5]])
    expected = load(folder, device="cpu", dtype="float32").model(tokens).logits
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    logits = load(folder, device="cpu", dtype="float32").model(tokens).logits
    assert torch.equal(logits, expected)
    quantize(folder, tmp_path / "out", recipe=RECIPE.replace(method="rtn"), device="cpu")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    before, after = (Checkpoint.open(path).tensor("lm_head.weight") for path in (folder, tmp_path / "out"))
    assert torch.equal(before, after)
    rotate(folder, tmp_path / "rotated", device="cpu")
    turned = load(tmp_path / "rotated", device="cpu", dtype="float32").model(tokens).logits
    # Rotating rounds every weight once.
    assert float((turned - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize("kind", ["v2 as v1", "v1 as v2", "v2 as v1, declared asymmetric", "awq, one up"])
def test_zero_points_of_another_format_are_refused_by_every_command(tmp_path: Path, kind: str) -> None:
    layout = {"v1 as v2": "gptq", "awq, one up": "awq"}.get(kind, "gptq-v2")
    folder = tmp_path / "model"
    save_quantized(folder, tiny_model("llama"), layout, random_quantizer())
    if layout == "awq":
        faults.change(folder, f"{VICTIM}.qzeros", faults.shift_zeros(1))
    else:
        edit_config(folder, checkpoint_format="gptq_v2" if layout == "gptq" else "gptq")
    if "asymmetric" in kind:
        edit_config(folder, sym=False)
    says = "zero points? decode"
    with pytest.raises(CheckpointError, match=says):
        load(folder, device="cpu")
    with pytest.raises(CheckpointError, match=says):
        convert(folder, tmp_path / "out", target_format="compressed-tensors")
    assert not (tmp_path / "out").exists()
    report = verify(folder)
    assert "readable" in {check.name for check in report.checks if check.status == "failed"}
    (note,) = (note for note in inspect(folder).notes if "zero point" in note)
    assert note.endswith("more modules)") == (layout != "awq")
    marlinq.register()
    try:
        with pytest.raises(CheckpointError, match=says):
            AutoModelForCausalLM.from_pretrained(folder)
    finally:
        marlinq.unregister()


def scaled(
    suffix: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[dict[str, torch.Tensor]], None]:
    """A change of a tensor's values as numbers; E8M0 that is stored as bytes stays so."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = f"{VICTIM}.{suffix}"
        stored = tensors[name]
        exponents = stored.dtype == torch.uint8
        wide = change((stored.view(torch.float8_e8m0fnu) if exponents else stored).float())
        changed = wide.to(torch.float8_e8m0fnu if exponents else stored.dtype)
        tensors[name] = changed.view(torch.uint8) if exponents else changed

    return edit


def first_is(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda scales: torch.where(torch.arange(scales.numel()).view(scales.shape) == 0, value, scales)


def nan_code(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{VICTIM}.weight"].view(torch.uint8)[0, 0] = 0x7F


VALUES: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], None], str, str]] = {
    "NVFP4, second level negative": (
        "nvfp4-a4 compressed-tensors",
        scaled("weight_global_scale", torch.neg),
        "scales",
        r"the second-level scale is -\d+.*, expected above 0",
    ),
    "ModelOpt, second level infinite": (
        "nvfp4-a4 modelopt",
        scaled("weight_scale_2", first_is(torch.inf)),
        "scales",
        "the second-level scale is inf, expected above 0",
    ),
    "NVFP4, input scale infinite": (
        "nvfp4-a4 compressed-tensors",
        scaled("input_global_scale", first_is(torch.inf)),
        "scales",
        "the activations' scale is inf, expected above 0",
    ),
    "ModelOpt, input scale negative": (
        "nvfp4-a4 modelopt",
        scaled("input_scale", torch.neg),
        "scales",
        "the activations' scale is -.*, expected above 0",
    ),
    "FP8 blocks, turned over": (
        "fp8-block fp8",
        scaled("weight_scale_inv", torch.reciprocal),
        "scales",
        "half of the scales reach weights of .*reciprocals",
    ),
    "FP8, code is NaN": (
        "fp8-block fp8",
        nan_code,
        "codes",
        "1 of 8192 codes stand for NaN",
    ),
    "MXFP8, bias twice": (
        "mxfp8 compressed-tensors",
        scaled("weight_scale", lambda scales: (scales.double() * 2.0**-118).float()),
        "scales",
        "half of the scales reach weights of .*, which add nothing",
    ),
    "MXFP4, scale is NaN": (
        "mxfp4 compressed-tensors",
        scaled("weight_scale", first_is(torch.nan)),
        "scales",
        "1 of 256 scales are NaN or infinite",
    ),
    "GPTQ, scale is zero": ("gptq", scaled("scales", first_is(0.0)), "scales", "1 of 256 scales are zero"),
    "GPTQ, groups of unequal size": (
        "gptq",
        lambda tensors: tensors[f"{VICTIM}.g_idx"].__setitem__(0, 1),
        "g_idx",
        "group 0 of g_idx has 31 channels, expected 32",
    ),
    "AWQ, scale infinite": (
        "awq",
        scaled("scales", first_is(torch.inf)),
        "scales",
        "1 of 256 scales are NaN or infinite",
    ),
    "Marlin, scale is NaN": (
        "marlin",
        scaled("s", first_is(torch.nan)),
        "scales",
        "1 of 256 scales are NaN or infinite",
    ),
    "INT, scale is zero": (
        "compressed-tensors",
        scaled("weight_scale", first_is(0.0)),
        "scales",
        "1 of 256 scales are zero",
    ),
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A sound checkpoint of each kind in :data:`VALUES`, made once."""
    root = tmp_path_factory.mktemp("kinds")
    save_plain(root / "model", tiny_model("llama", num_hidden_layers=1))

    def make(kind: str) -> Path:
        named, _, form = kind.rpartition(" ")
        out = root / kind.replace(" ", "-")
        if not out.exists():
            ways = {"scheme": named.removesuffix("-a4")} if named else {"group_size": 32}
            recipe = Recipe(method="rtn", format=form, overrides=(Override("self_attn", skip=True),), **ways)
            quantize(root / "model", out, recipe=recipe, device="cpu", progress=False)
            if named.endswith("-a4"):
                with_four_bit_inputs(out)
        return out

    return make


@pytest.mark.parametrize("fault", VALUES)
def test_values_that_no_quantiser_writes_are_refused_by_every_command(
    kinds: Callable[[str], Path], tmp_path: Path, fault: str
) -> None:
    kind, change, row, says = VALUES[fault]
    folder = shutil.copytree(kinds(kind), tmp_path / "model")
    load(folder, device="cpu")
    assert not inspect(folder).notes
    edit_tensors(folder, change)
    named = f"{VICTIM}: {says}"
    with pytest.raises(CheckpointError, match=f"{named}.*; copy the checkpoint again"):
        load(folder, device="cpu")
    others = {"compressed-tensors": "gptq", "gptq": "awq"}
    # Integers and FP8 in blocks have a second format; no other one holds the remaining kinds.
    has_another = " " not in kind or kind.startswith("fp8")
    for target in ("dense", *([others.get(kind, "compressed-tensors")] if has_another else [])):
        with pytest.raises(CheckpointError, match=named):
            convert(folder, tmp_path / "out", target_format=target, allow_loss=target == "dense")
    failed = {check.name: check for check in verify(folder, device="cpu").checks if check.status == "failed"}
    assert re.search(named, failed[row].detail)
    assert "readable" not in failed
    marlinq.register()
    try:
        with pytest.raises(CheckpointError, match=named):
            AutoModelForCausalLM.from_pretrained(folder)
    finally:
        marlinq.unregister()
    if row != "codes":  # inspect reads no codes
        assert any(re.search(named, note) for note in inspect(folder).notes)


def divided_by_zero(tensors: dict[str, torch.Tensor]) -> None:
    """The first block of the first output, as old versions of ModelOpt store one that is too small."""
    scaled("weight_scale", first_is(0.0))(tensors)
    words = tensors[f"{VICTIM}.weight"]
    # Codes 7 and 15 are 6 and -6, code 8 is a zero.
    words[0, :8] = torch.tensor([0x77, 0xFF, 0x7F, 0x88, 0xF7, 0x77, 0x77, 0xFF], dtype=torch.uint8)


def test_a_scale_that_underflowed_below_a_second_level_is_read(
    kinds: Callable[[str], Path], tmp_path: Path
) -> None:
    """The weights are zero, as they should nearly be."""
    folder = shutil.copytree(kinds("nvfp4-a4 modelopt"), tmp_path / "model")
    edit_tensors(folder, divided_by_zero)
    weight = load(folder, device="cpu", dtype="float32").model.get_submodule(VICTIM)
    first = weight(torch.eye(64))[:, 0]
    assert not bool(first[:16].any())
    assert bool(first[16:].any())
    assert not inspect(folder).notes
    scales = next(check for check in verify(folder, device="cpu").checks if check.name == "scales")
    assert scales.status == "warning"
    assert "1 of 512 scales were rounded to zero" in scales.problems[0]


def test_a_scale_that_was_lost_below_a_second_level_is_refused(
    kinds: Callable[[str], Path], tmp_path: Path
) -> None:
    """Codes of all magnitudes were not divided by zero."""
    folder = shutil.copytree(kinds("nvfp4-a4 modelopt"), tmp_path / "model")
    edit_tensors(folder, scaled("weight_scale", first_is(0.0)))
    with pytest.raises(CheckpointError, match="1 of 512 scales are zero"):
        load(folder, device="cpu")
    assert any("1 of 512 scales are zero" in note for note in inspect(folder).notes)
    assert "scales" in {
        check.name for check in verify(folder, device="cpu").checks if check.status == "failed"
    }
    edit_tensors(folder, scaled("weight_scale", torch.zeros_like))
    with pytest.raises(CheckpointError, match="512 of 512 scales are zero"):
        load(folder, device="cpu")


def test_inspect_finds_scales_just_below_the_bound_that_load_has(
    kinds: Callable[[str], Path], tmp_path: Path
) -> None:
    """The largest code is 8 steps from the zero point, so weights reach 2**-56.5, below 2**-56."""
    folder = shutil.copytree(kinds("compressed-tensors"), tmp_path / "model")

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        name = f"{VICTIM}.weight_scale"
        tensors[name] = torch.full(tensors[name].shape, 2.0**-59.5, dtype=torch.bfloat16)

    edit_tensors(folder, shrink)
    with pytest.raises(CheckpointError, match="which add nothing to any output"):
        load(folder, device="cpu")
    assert any("which add nothing to any output" in note for note in inspect(folder).notes)


def save_scaled(folder: Path, part: str, factor: float) -> Path:
    """A tiny Llama whose tensors named with ``part`` are ``factor`` times the usual ones."""
    model = tiny_model("llama", num_hidden_layers=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.mul_(factor)
    return save_plain(folder, model)


def test_an_activation_scale_that_its_dtype_cannot_hold_is_not_written(tmp_path: Path) -> None:
    folder = save_scaled(tmp_path / "model", "norm", 1e-7)
    ways = {"scheme": "fp8-static", "calibration": str(ROWS), "samples": 8, "max_length": 40}
    recipe = Recipe(format="compressed-tensors", **ways)
    says = r"rounds the activation scale of \S+e-\d+ to 0; choose --format fp8"
    with pytest.raises(NumericsError, match=says):
        quantize(folder, tmp_path / "refused", recipe=recipe, device="cpu")
    quantize(folder, tmp_path / "out", recipe=recipe.replace(format="fp8"), device="cpu")
    load(tmp_path / "out", device="cpu")


@pytest.mark.parametrize("factor", [1e-20, 1e6])
@pytest.mark.parametrize("kind", ["mxfp4 compressed-tensors", "fp8-block fp8", "nvfp4 modelopt"])
def test_weights_that_no_command_would_read_are_not_written(tmp_path: Path, kind: str, factor: float) -> None:
    folder = save_scaled(tmp_path / "model", "proj", factor)
    named, _, form = kind.partition(" ")
    recipe = Recipe(method="rtn", scheme=named, format=form)
    with pytest.raises(
        NumericsError, match="half of the scales reach weights of .*check the source checkpoint"
    ):
        quantize(folder, tmp_path / "out", recipe=recipe, device="cpu")


def test_any_scale_of_zeros_is_sound(kinds: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(kinds("mxfp8 compressed-tensors"), tmp_path / "model")

    def prune(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{VICTIM}.weight"].view(torch.uint8).zero_()
        tensors[f"{VICTIM}.weight_scale"].zero_()

    edit_tensors(folder, prune)
    load(folder, device="cpu")
    assert not [check.name for check in verify(folder, device="cpu").checks if check.status == "failed"]
    assert not inspect(folder).notes

    def keep_a_weight(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{VICTIM}.weight"].view(torch.uint8)[0, 0] = 0x38
        tensors[f"{VICTIM}.weight_scale"].flatten()[0] = 127

    edit_tensors(folder, keep_a_weight)
    load(folder, device="cpu")
    assert not [check.name for check in verify(folder, device="cpu").checks if check.status == "failed"]


UNDECLARED = {
    "gptq": "gptq or gptq-v2, .*quant_method gptq with bits, group_size",
    "awq": "awq, .*quant_method awq with bits, group_size, zero_point",
    "marlin": "marlin, .*quant_method gptq with bits",
    "compressed-tensors": "compressed-tensors, .*quant_method compressed-tensors with format, config_groups",
    "fp8-block fp8": "fp8.*quant_method fp8 with activation_scheme, weight_block_size",
    "nvfp4 modelopt": "modelopt, .*quant_method modelopt with quant_algo",
}


@pytest.mark.parametrize("kind", UNDECLARED)
def test_quantised_tensors_without_a_config_are_named_by_every_command(
    kinds: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    folder = shutil.copytree(kinds(kind), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    for extra in ("quantize_config.json", "hf_quant_config.json"):
        (folder / extra).unlink(missing_ok=True)
    described = inspect(folder)
    (note,) = described.notes
    says = rf"tensors such as model\.layers\.0\.mlp\.\w+\.\w+ look like {UNDECLARED[kind]}"
    assert re.match(says, note)
    assert "not declared" in str(described)
    (failed,) = (check for check in verify(folder, device="cpu").checks if check.status == "failed")
    assert note in failed.detail
    for attempt in every_command(folder, tmp_path / "out"):
        with pytest.raises(CheckpointError, match=re.escape(note)):
            attempt()
    assert not (tmp_path / "out").exists()


def every_command(folder: Path, out: Path) -> list[Callable[[], object]]:
    """Calls of every command that reads a folder's weights; those that write one write ``out``."""
    return [
        lambda: load(folder, device="cpu"),
        lambda: convert(folder, out, target_format="gptq"),
        lambda: convert(folder, out, target_format="dense", allow_loss=True),
        lambda: quantize(folder, out, recipe=RECIPE.replace(method="rtn"), device="cpu"),
        lambda: rotate(folder, out, device="cpu"),
    ]


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("quantization_config", [], "expected an object, found []; remove it if"),
        ("quantization_config", False, "expected an object, found False"),
        ("quantization_config", "fp8", "expected an object, found 'fp8'"),
        ("compression_config", 0, "expected an object, found 0"),
        ("text_config.quantization_config", "", "expected an object, found ''"),
        ("quantization_config", {"group_size": 128}, "quant_method: expected one of auto-round, awq, "),
    ],
)
def test_what_is_no_config_is_refused_by_every_command(
    tmp_path: Path, path: str, value: Any, says: str
) -> None:
    """Half a config may be what is left of a quantised model's."""
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    config = json.loads((folder / "config.json").read_text())
    outer, _, key = path.rpartition(".")
    (config.setdefault(outer, {}) if outer else config)[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    message = f"{folder / 'config.json'}: {path}: {says}"
    for attempt in (*every_command(folder, tmp_path / "out"), lambda: inspect(folder)):
        with pytest.raises(CheckpointError, match=re.escape(message)) as raised:
            attempt()
        assert "\n" not in str(raised.value)
    (failed,) = (check for check in verify(folder, device="cpu").checks if check.status == "failed")
    assert message in failed.detail
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [None, {}])
def test_null_and_an_empty_object_are_no_config(tmp_path: Path, value: Any) -> None:
    """Exports of unquantised models have both; a config at another place still counts."""
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": value}))
    assert inspect(folder).format is None
    load(folder, device="cpu")
    quantize(folder, tmp_path / "out", recipe=RECIPE.replace(method="rtn"), device="cpu")
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    made |= {"quantization_config": value, "compression_config": made["quantization_config"]}
    (tmp_path / "out" / "config.json").write_text(json.dumps(made))
    (tmp_path / "out" / "quantize_config.json").unlink(missing_ok=True)
    assert inspect(tmp_path / "out").format == "gptq"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (f"{VICTIM}.weight", torch.int8),
        (f"{VICTIM}.weight", torch.float8_e4m3fn),
        ("model.norm.weight", torch.int32),
        ("model.embed_tokens.weight", torch.uint8),
    ],
)
def test_codes_without_scales_or_config_are_refused_by_every_command(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """``load`` would have taken the codes for weights."""
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    edit_tensors(folder, lambda tensors: tensors.update({name: (tensors[name] * 20).to(dtype)}))
    (note,) = inspect(folder).notes
    assert re.match(rf"{name}: expected floating point \[.*\], found {str(dtype)[6:]} without scales;", note)
    (failed,) = (check for check in verify(folder, device="cpu").checks if check.status == "failed")
    assert note in failed.detail
    for attempt in every_command(folder, tmp_path / "out"):
        with pytest.raises(CheckpointError, match=re.escape(note)):
            attempt()
    assert not (tmp_path / "out").exists()


def test_codes_without_scales_beside_quantised_linears_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_quantized(folder, tiny_model("llama"), "gptq", random_quantizer())
    add_draft_head(folder, 0, "mtp")
    edit_tensors(folder, lambda tensors: tensors.update({"mtp.fc.weight": tensors["mtp.fc.weight"].char()}))
    load(folder, device="cpu")
    told = "mtp.fc.weight: expected floating point [64, 128], found int8 without scales; the draft head"
    assert inspect(folder).notes[0].startswith(told)
    (warned,) = (check for check in verify(folder, device="cpu").checks if check.status == "warning")
    assert warned.detail.startswith(told)
    name = "model.embed_tokens.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: (tensors[name] * 20).char()}))
    for attempt in (*every_command(folder, tmp_path / "out"), lambda: inspect(folder)):
        with pytest.raises(CheckpointError, match=rf"{name}: expected floating point .* found int8 without"):
            attempt()
    (failed,) = (check for check in verify(folder, device="cpu").checks if check.status == "failed")
    assert name in failed.detail


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_zero_points_of_activations_are_no_codes(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tmp_path / "model"
    save_quantized(folder, tiny_model("llama"), "gptq", random_quantizer())
    name = "model.layers.0.self_attn.k_proj.output_zero_point"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(1).to(dtype)}))
    view = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert view is not None
    assert name in view.passthrough


def test_a_draft_head_of_codes_is_told_in_an_unquantised_folder(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    add_draft_head(folder, 0, "mtp")
    assert not inspect(folder).notes
    name = "mtp.layers.0.mlp.up_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: tensors[name].char()}))
    (note,) = inspect(folder).notes
    assert note.startswith(f"{name}: expected floating point [128, 64], found int8 without scales; the draft")


@pytest.mark.parametrize("name", ["quantize_config.json", "hf_quant_config.json"])
@pytest.mark.parametrize(("value", "says"), [(None, ""), ({}, ""), ([], "found []"), (False, "found False")])
def test_configs_beside_config_json_keep_the_same_rule(
    tmp_path: Path, name: str, value: Any, says: str
) -> None:
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    (folder / name).write_text(json.dumps({"quantization": value}))
    if not says:
        assert inspect(folder).format is None
        return
    message = f"{folder / name}: quantization: expected an object, {says}"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        inspect(folder)


@pytest.mark.parametrize("target", ["awq", "dense"])
def test_convert_tells_a_tensor_that_the_model_has_not(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "model"
    save_quantized(folder, tiny_model("llama", num_hidden_layers=1), "gptq", random_quantizer())
    edit_tensors(folder, lambda tensors: tensors.update({"score.weight": torch.ones(2, 64)}))
    notes = convert(folder, tmp_path / "out", target_format=target).notes
    says = "tensor 'score.weight' (1 such) has no place in LlamaForCausalLM"
    assert [note.endswith("; marlinq will not load the output either") for note in notes if says in note] == [
        True
    ]
    with pytest.raises(CheckpointError, match=re.escape(says)):
        load(tmp_path / "out", device="cpu")


def test_rotate_refuses_and_quantize_tells_a_tensor_that_the_model_has_not(tmp_path: Path) -> None:
    """Both copied it, and ``load`` refused the result."""
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    edit_tensors(folder, lambda tensors: tensors.update({"score.weight": torch.ones(2, 64)}))
    says = r"tensor 'score.weight' \(1 such\) has no place in LlamaForCausalLM"
    with pytest.raises(CheckpointError, match=says):
        rotate(folder, tmp_path / "rotated", device="cpu")
    assert not (tmp_path / "rotated").exists()
    with pytest.warns(UserWarning, match=rf"{says}.*; marlinq will not load the output either"):
        quantize(folder, tmp_path / "out", recipe=RECIPE.replace(method="rtn"), device="cpu")
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path / "out", device="cpu")


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.extra.weight", "model.extra.weight", "extra"])
def test_a_tensor_that_the_model_has_not_is_shown_by_inspect(
    tmp_path: Path, name: str, quantised: bool
) -> None:
    """``load`` refuses it."""
    folder = tmp_path / "model"
    if quantised:
        save_quantized(folder, tiny_model("llama"), "gptq", random_quantizer())
    else:
        save_tiny("llama", folder)
    assert not inspect(folder).notes
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(64, 64)}))
    described = inspect(folder)
    (note,) = described.notes
    assert note.startswith(f"tensor {name!r} (1 such) has no place in LlamaForCausalLM")
    assert not described.servers[0].loads
    with pytest.raises(CheckpointError, match=re.escape(note)):
        load(folder, device="cpu")


@pytest.mark.parametrize("changes", ["added", "removed"])
def test_tensors_of_every_block_or_missing_ones_are_shown_by_inspect(tmp_path: Path, changes: str) -> None:
    folder = save_tiny("llama", tmp_path / "model", blocks=2)
    if changes == "added":
        extra = {f"model.layers.{block}.mlp.extra.weight": torch.ones(4, 64) for block in (0, 1)}
        edit_tensors(folder, lambda tensors: tensors.update(extra))
    else:
        edit_tensors(folder, lambda tensors: tensors.pop(f"{VICTIM}.weight"))
    (note,) = inspect(folder).notes
    assert re.search(r"mlp.extra.weight' \(2 such\)|expected a tensor '.*up_proj.weight'", note)
    with pytest.raises(CheckpointError, match=re.escape(note)):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", (96, 64)),
        ("llama", "model.layers.0.input_layernorm.weight", (32,)),
        ("llama", "model.layers.0.self_attn.q_proj.bias", (64,)),
        ("llama", "model.layers.2.mlp.up_proj.weight", (128, 64)),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (64, 64)),
    ],
)
def test_usual_names_of_other_models_and_wrong_shapes_are_shown_by_inspect(
    tmp_path: Path, family: str, name: str, shape: tuple[int, ...]
) -> None:
    folder = save_tiny(family, tmp_path / "model", blocks=2)
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(shape)}))
    (note,) = inspect(folder).notes
    assert name in note
    with pytest.raises(CheckpointError, match=re.escape(note)):
        load(folder, device="cpu")


def test_scales_rounded_up_to_powers_of_two_are_judged_by_their_weights(tmp_path: Path) -> None:
    """Weights of 6e4 have the scale 256, with which codes could reach 1.1e5."""
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    name = f"{VICTIM}.weight"
    edit_tensors(
        folder, lambda tensors: tensors.update({name: tensors[name] / tensors[name].abs().max() * 6e4})
    )
    recipe = Recipe(method="rtn", scheme="fp8-block", format="deepseek-v4")
    quantize(folder, tmp_path / "out", recipe=recipe, device="cpu")
    view = QuantizedCheckpoint.of(Checkpoint.open(tmp_path / "out"))
    assert view is not None
    stored = view.load(VICTIM)
    assert float(stored.scales.float().max()) == 256
    assert 5.9e4 < float(stored.dequantize().abs().max()) <= 2**16
    assert verify(tmp_path / "out", against=folder, device="cpu").ok
    assert not inspect(tmp_path / "out").notes
    # The next power of two is beyond every model's weights.
    scale = f"{VICTIM}.scale"
    edit_tensors(
        tmp_path / "out",
        lambda tensors: tensors.update({scale: (tensors[scale].float() * 2).to(torch.float8_e8m0fnu)}),
    )
    says = r"half of the scales reach weights of 1\.2"
    with pytest.raises(CheckpointError, match=says):
        load(tmp_path / "out", device="cpu")
    assert re.search(says, inspect(tmp_path / "out").notes[0])


def test_weights_that_rounding_moves_beyond_float16_are_not_written(tmp_path: Path) -> None:
    """A float16 model that reads them multiplies by infinity."""
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    name = f"{VICTIM}.weight"

    def scaled(tensors: dict[str, torch.Tensor], largest: float) -> None:
        tensors[name] *= largest / tensors[name].abs().max()

    recipe = Recipe(method="rtn", scheme="mxfp4", format="compressed-tensors")
    config = json.loads((folder / "config.json").read_text())
    for dtype, largest in (("bfloat16", 6e4), ("float16", 4.5e4)):
        (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        edit_tensors(folder, lambda tensors, largest=largest: scaled(tensors, largest))  # type: ignore[misc]
        quantize(folder, tmp_path / dtype, recipe=recipe, device="cpu")
    convert(tmp_path / "float16", tmp_path / "dense", target_format="dense", allow_loss=True)
    edit_tensors(folder, lambda tensors: scaled(tensors, 6e4))
    says = rf"{VICTIM}: a weight is rounded to 65536, which overflows the model's float16"
    with pytest.raises(NumericsError, match=says):
        quantize(folder, tmp_path / "out", recipe=recipe, device="cpu")


@pytest.mark.parametrize("suffix", ["scales", "g_idx"])
def test_a_tensor_with_the_name_of_a_part_is_refused_before_quantising(tmp_path: Path, suffix: str) -> None:
    """Two tensors of one name would have made a file that nobody reads."""
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    edit_tensors(folder, lambda tensors: tensors.update({f"{VICTIM}.{suffix}": torch.ones(4)}))
    says = rf"{VICTIM}\.{suffix} would be read as part of a module in gptq"
    with pytest.raises(CheckpointError, match=says):
        quantize(folder, tmp_path / "out", recipe=RECIPE.replace(method="rtn"), device="cpu")
    assert not list(tmp_path.glob("out*"))


def test_a_leftover_config_beside_an_unquantised_model_is_named(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model", blocks=1)
    leftover = folder / "quantize_config.json"
    leftover.write_text('{"bits": 4, "group_size": 128}')
    says = re.escape(f"{leftover} says gptq, but no quantised tensor ends in .qweight; remove it")
    for attempt in (lambda: load(folder, device="cpu"), lambda: inspect(folder)):
        with pytest.raises(CheckpointError, match=says):
            attempt()
    leftover.unlink()
    load(folder, device="cpu")


UNDECLARED_TENSORS: list[tuple[dict[str, tuple[str, tuple[int, ...]]], str | None]] = [
    (
        {
            "experts.gate_up_proj_blocks": ("uint8", (2, 64, 2, 16)),
            "experts.gate_up_proj_scales": ("uint8", (2, 64, 2)),
        },
        "experts.gate_up_proj_blocks look like gpt-oss, .*quant_method mxfp4",
    ),
    (
        {"q.compressed": ("float16", (64, 32)), "q.bitmask": ("uint8", (64, 8)), "q.shape": ("int64", (2,))},
        "q.bitmask look like sparse-24-bitmask, .*with sparsity_config",
    ),
    (
        {"q.weight": ("float8_e4m3fn", (64, 64)), "q.weight_scale_inv": ("float32", (1, 1))},
        "q.weight look like fp8",
    ),
    ({"q.weight": ("bfloat16", (64, 64)), "q.weight_scale": ("float32", ())}, None),
    ({"q.qweight": ("int32", (64,)), "q.scales": ("float16", (64,))}, None),
]


@pytest.mark.parametrize(("tensors", "says"), UNDECLARED_TENSORS)
def test_other_tensors_without_a_config(
    tmp_path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], says: str | None
) -> None:
    made = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in tensors.items()}
    save_file(
        {f"model.layers.0.{name}": tensor for name, tensor in made.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    notes = inspect(tmp_path).notes
    assert len(notes) == (says is not None)
    assert says is None or re.search(says, notes[0])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised Mixtral in compressed-tensors."""
    folder = tmp_path_factory.mktemp("mixture")
    save_mixture(folder / "model", "mixtral")
    recipe = Recipe(method="rtn", group_size=32, format="compressed-tensors")
    quantize(folder / "model", folder / "quantized", recipe=recipe, device="cpu")
    return folder / "quantized"


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "marlinq.json").unlink(missing_ok=True)


def test_a_quantised_router_is_named_by_every_command(mixture: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(mixture, tmp_path / "model")
    router = "model.layers.0.block_sparse_moe.gate"

    def quantise_it(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors.pop(f"{router}.weight")
        q = round_to_nearest(weight, scheme(32))
        tensors |= {f"{router}.{key}": value for key, value in INTEGERS["compressed-tensors"].pack(q).items()}

    edit_tensors(folder, quantise_it)
    edit_config(folder, ignore=["model.layers.1.block_sparse_moe.gate", "lm_head"])
    says = rf"quantised module {router} \(1 such\) is no linear of MixtralForCausalLM, but its router of 4"
    with pytest.raises(CheckpointError, match=says):
        load(folder, device="cpu")
    with pytest.raises(CheckpointError, match=says):
        convert(folder, tmp_path / "out", target_format="gptq")
    assert not (tmp_path / "out").exists()
    checks = verify(folder, device="cpu").checks
    assert any(re.search(says, check.detail) for check in checks if check.status == "failed")
    described = inspect(folder)
    assert re.search(says, described.servers[0].reason)
    assert not described.servers[0].loads
    assert any(re.search(says, note) for note in described.notes)
    # The way that the message advises.
    convert(folder, tmp_path / "dense", target_format="dense", allow_loss=True)
    load(tmp_path / "dense", device="cpu")


def test_a_quantised_draft_layer_is_ignored_where_the_model_is_told_to(tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", "qwen3-next")
    recipe = Recipe(method="rtn", group_size=32, format="gptq")
    quantize(tmp_path / "model", tmp_path / "out", recipe=recipe, device="cpu")
    folder = tmp_path / "out"

    def add_draft(tensors: dict[str, torch.Tensor]) -> None:
        attention = "model.layers.1.self_attn.q_proj."
        for name in [name for name in tensors if name.startswith(attention)]:
            tensors[f"mtp.layers.0.self_attn.q_proj.{name.removeprefix(attention)}"] = tensors[name].clone()

    edit_tensors(folder, add_draft)
    loaded = load(folder, device="cpu")
    assert not any(name.startswith("mtp") for name in loaded.decisions)
    assert not [check for check in verify(folder, device="cpu").checks if check.status == "failed"]
    assert inspect(folder).servers[0].loads
    convert(folder, tmp_path / "awq", target_format="awq")


def test_conversion_unties_a_head_that_differs_from_the_embedding(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_quantized(folder, tiny_model("llama"), "gptq", random_quantizer())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    says = "lm_head: differs from the embedding"
    assert any(says in note for note in inspect(folder).notes)
    row = next(check for check in verify(folder, device="cpu").checks if check.name == "config")
    assert row.status == "warning"
    assert says in row.detail
    for target in ("awq", "dense"):
        report = convert(folder, tmp_path / target, target_format=target, allow_loss=target == "dense")
        assert any("lm_head differs from the embedding" in note for note in report.notes)
        assert json.loads((tmp_path / target / "config.json").read_text())["tie_word_embeddings"] is False
    # A copy of the embedding is a tie all the same.
    edit_tensors(
        folder,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    assert not any("tie_word_embeddings" in note for note in inspect(folder).notes)
    convert(folder, tmp_path / "tied", target_format="awq")
    assert json.loads((tmp_path / "tied" / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_dtype_that_the_weights_contradict_is_said_and_never_overflows(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_quantized(folder, tiny_model("llama").to(torch.bfloat16), "gptq", random_quantizer())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    row = next(check for check in verify(folder, device="cpu").checks if check.name == "config")
    assert "names float16, but weights are stored in bfloat16" in row.detail
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(1e5))
    with pytest.raises(UnsupportedError, match="model.norm.weight: a value of .* overflows float16"):
        load(folder, device="cpu", dtype="float16")
    failed = {check.name for check in verify(folder, device="cpu").checks if check.status == "failed"}
    assert failed == {"finite"}


def test_missing_buffers_and_ends_beyond_the_vocabulary_are_said(tmp_path: Path) -> None:
    save_mixture(tmp_path / "model", "deepseek-v3")
    recipe = Recipe(method="rtn", group_size=32)
    quantize(tmp_path / "model", tmp_path / "out", recipe=recipe, device="cpu")
    folder = tmp_path / "out"
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    edit_tensors(folder, lambda tensors: tensors.__delitem__(bias))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 4096]}')
    row = next(check for check in verify(folder, device="cpu").checks if check.name == "loads")
    assert row.status == "warning"
    notes = " ".join(load(folder, device="cpu").notes)
    for said in (f"{bias}: not stored", "eos_token_id 4096 is no token of a vocabulary"):
        assert said in notes
        assert said in " ".join((row.detail, *row.problems))
