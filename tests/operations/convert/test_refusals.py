"""Refusals and their words, which leave nothing behind; modules that are kept unquantised instead."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import (
    CheckpointError,
    ConversionRefused,
    MarlinqError,
    OutputError,
    UnsupportedError,
    UsageError,
)
from marlinq.operations.convert import convert
from marlinq.operations.convert import convert_checkpoint as operation_module
from tests.testing.layouts import INTEGERS
from tests.testing.quantized_folders import (
    CONFIG,
    all_tensors,
    assert_holds,
    model_tuples,
    opened,
    plain_tensors,
    random_tuple,
    write,
)

FIRST = "model.layers.0.mlp.down_proj"


def assert_refused(
    before: Path, kind: type[MarlinqError], *says: str, target: str = "marlin", **options: Any
) -> None:
    with pytest.raises(kind) as caught:
        convert(before, before.parent / "after", target_format=target, **options)
    message = str(caught.value)
    assert all(part in message for part in says), message
    assert "\n" not in message
    assert not list(before.parent.glob("after*"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def test_the_formats_must_fit(tmp_path: Path) -> None:
    before = write(tmp_path / "before", "gptq", model_tuples())
    assert_refused(before, UsageError, "layout already", target="gptq")
    assert_refused(before, UsageError, "expected a awq checkpoint, found gptq", source_format="awq")
    assert_refused(before, UsageError, "unknown format 'gguf'", target="gguf")
    assert_refused(before, UsageError, "--strict-marlin", target="awq", strict_marlin=True)
    assert_refused(before, UsageError, "--scheme fp8: awq can't hold fp8_e4m3", target="awq", scheme="fp8")
    assert_refused(before, UsageError, "--scheme fp8: dense weights are not", target="dense", scheme="fp8")
    (tmp_path / "after").mkdir()
    with pytest.raises(OutputError, match="already exists"):
        convert(before, tmp_path / "after", target_format="marlin")
    with pytest.raises(OutputError, match="lies inside"):
        convert(before, before / "marlin", target_format="marlin")
    assert not list(before.glob("marlin*"))


def test_an_unquantised_model_is_not_converted(tmp_path: Path) -> None:
    before = tmp_path / "before"
    before.mkdir()
    (before / "config.json").write_text(json.dumps(CONFIG))
    save_file(plain_tensors({}), before / "model.safetensors")
    assert_refused(before, UnsupportedError, "not quantised", "marlinq quantize")


def test_trivial_g_idx_under_desc_act_is_read_by_the_tensor(tmp_path: Path) -> None:
    modules = model_tuples()
    before = write(
        tmp_path / "before", "gptq", modules, quantization={"desc_act": True, "static_groups": True}
    )
    for target in ("gptq-v2", "awq", "marlin", "compressed-tensors"):
        report = convert(before, tmp_path / target, target_format=target)
        assert_holds(tmp_path / target, target, modules)
        assert any("desc_act: true" in note for note in report.notes)
    for target in ("gptq-v2", "marlin"):
        assert opened(tmp_path / target).config.raw["desc_act"] is False


def test_activation_order_under_a_config_that_denies_it(tmp_path: Path) -> None:
    modules = model_tuples(scattered=True)
    before = write(tmp_path / "before", "gptq", modules, quantization={"desc_act": False})
    assert_refused(before, ConversionRefused, FIRST, "activation order")
    report = convert(before, tmp_path / "v2", target_format="gptq-v2")
    assert opened(tmp_path / "v2").config.raw["desc_act"] is True
    assert any("activation order" in note for note in report.notes)


def test_one_scattered_module_is_enough(tmp_path: Path) -> None:
    modules = model_tuples()
    name = "model.layers.1.self_attn.o_proj"
    modules[name] = random_tuple(128, 128, 5, scattered=True)
    before = write(tmp_path / "before", "gptq", modules)
    assert_refused(before, ConversionRefused, name, "activation order", target="awq")


def shift_zeros(delta: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("qzeros"):
                tensor += delta * 0x11111111

    return change


@pytest.mark.parametrize(("layout", "delta", "decoded"), [("gptq", 1, 9), ("gptq-v2", -1, 7)])
def test_zeros_of_the_other_gptq_version_contradict_sym(
    tmp_path: Path, layout: str, delta: int, decoded: int
) -> None:
    before = write(tmp_path / "before", layout, model_tuples())
    edit_tensors(before, shift_zeros(delta))
    assert_refused(
        before,
        CheckpointError,
        FIRST,
        "sym: true",
        f"for example {decoded}",
        "checkpoint_format",
        target="awq",
    )


@pytest.mark.parametrize("writer", [None, ["gptqmodel:7.6.0"], "autogptq:0.7"])
def test_v1_zeros_of_0_need_a_known_writer(tmp_path: Path, writer: list[str] | str | None) -> None:
    modules = model_tuples(zeros="any", group_size=64)
    before = write(tmp_path / "before", "gptq-v2", modules)
    # GPTQModel subtracts from whole words.
    edit_tensors(before, shift_zeros(-1))
    edit_config(before, checkpoint_format="gptq", format="gptq", meta={"quantizer": writer})
    if writer == ["gptqmodel:7.6.0"]:
        convert(before, tmp_path / "after", target_format="gptq-v2")
        assert_holds(tmp_path / "after", "gptq-v2", modules)
        assert opened(tmp_path / "after").config.zero_writer is None
    else:
        assert_refused(before, ConversionRefused, FIRST, "different writers", target="gptq-v2")


@pytest.mark.parametrize("scale", [1e-9, 7e4])
def test_scales_outside_float16_are_refused(tmp_path: Path, scale: float) -> None:
    modules = model_tuples(dtype=torch.bfloat16)
    modules[FIRST].scales[1, 3] = scale
    before = write(tmp_path / "before", "compressed-tensors", modules)
    for target in ("gptq", "gptq-v2", "awq", "marlin"):
        assert_refused(before, ConversionRefused, FIRST, "1 of 1024 scales", "float16", target=target)


SHAPES = {
    "N no multiple of 64": (random_tuple(128, 96, 1), "N=96", {}),
    "K no multiple of 16": (random_tuple(72, 64, 1, group_size=24), "K=72", {}),
    "group size 16": (random_tuple(128, 64, 1, group_size=16), "group size 16", {}),
    "strict N": (random_tuple(128, 128, 1, group_size=128), "N=128 of 256", {"strict_marlin": True}),
    "strict K": (random_tuple(192, 256, 1, group_size=-1), "K=192", {"strict_marlin": True}),
    "strict group": (random_tuple(256, 256, 1, group_size=64), "128 and -1", {"strict_marlin": True}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_marlin_excludes_are_refused_or_kept_unquantised(tmp_path: Path, name: str) -> None:
    odd, says, options = SHAPES[name]
    good = random_tuple(256, 256, 2, group_size=128 if options else 32)
    modules = {"model.layers.0.mlp.up_proj": good, "model.layers.0.mlp.down_proj": odd}
    before = write(tmp_path / "before", "gptq", modules)
    assert_refused(before, ConversionRefused, "down_proj", says, "--skip-unsupported", **options)
    report = convert(before, tmp_path / "after", target_format="marlin", skip_unsupported=True, **options)
    assert list(report.skipped) == ["model.layers.0.mlp.down_proj"]
    assert says in report.skipped["model.layers.0.mlp.down_proj"].reason
    assert "model.layers.0.mlp.down_proj" in report.render()
    assert_holds(tmp_path / "after", "marlin", {"model.layers.0.mlp.up_proj": good})
    weight = all_tensors(tmp_path / "after")["model.layers.0.mlp.down_proj.weight"]
    assert weight.dtype == torch.float16
    assert torch.equal(weight, odd.dequantize(torch.float16))
    after = opened(tmp_path / "after")
    assert after.config.rules.scheme("model.layers.0.mlp.down_proj") is None
    assert after.config.rules.scheme("model.layers.0.mlp.up_proj") is not None


def test_a_strict_conversion_that_fits_is_made(tmp_path: Path) -> None:
    modules = {"model.layers.0.mlp.up_proj": random_tuple(256, 512, 2, group_size=128)}
    before = write(tmp_path / "before", "awq", modules)
    convert(before, tmp_path / "after", target_format="marlin", strict_marlin=True)
    assert_holds(tmp_path / "after", "marlin", modules)


def test_nothing_left_to_quantise_is_refused(tmp_path: Path) -> None:
    before = write(tmp_path / "before", "gptq", model_tuples(bits=8))
    assert_refused(before, ConversionRefused, "no module", "int8 weights", skip_unsupported=True)
    # Skipping is no way out, so it is not named.
    assert_refused(
        before,
        ConversionRefused,
        "no module would stay quantised; choose --to gptq-v2 or compressed-tensors or dense",
    )
    assert_refused(before, ConversionRefused, "integers and floats are never converted", target="fp8")


def test_a_fused_neighbour_that_is_skipped_is_noted(tmp_path: Path) -> None:
    modules = model_tuples()
    modules["model.layers.0.self_attn.k_proj"] = random_tuple(128, 32, 4)
    before = write(tmp_path / "before", "gptq", modules)
    report = convert(before, tmp_path / "after", target_format="marlin", skip_unsupported=True)
    assert any("k_proj" in note and "fuse" in note for note in report.notes)


def test_dequantised_weights_of_gpt2_are_stored_transposed(tmp_path: Path) -> None:
    modules = {"h.0.attn.c_attn": random_tuple(64, 96, 1), "h.0.attn.c_proj": random_tuple(64, 64, 2)}
    gpt2 = {**CONFIG, "model_type": "gpt2", "dtype": "bfloat16"}
    before = write(tmp_path / "before", "gptq", modules, config=gpt2)
    convert(before, tmp_path / "after", target_format="marlin", skip_unsupported=True)
    weight = all_tensors(tmp_path / "after")["h.0.attn.c_attn.weight"]
    assert torch.equal(weight, modules["h.0.attn.c_attn"].dequantize(torch.bfloat16).t())


def test_contradicting_headers_are_refused_before_writing(tmp_path: Path) -> None:
    before = write(tmp_path / "before", "gptq", model_tuples(group_size=64))
    edit_config(before, group_size=32)
    assert_refused(before, CheckpointError, ".qzeros: expected", target="awq")


def test_stacked_experts_are_named(tmp_path: Path) -> None:
    before = write(tmp_path / "before", "gptq", model_tuples())

    def stack(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.experts.qweight"] = torch.zeros(2, 8, 64, dtype=torch.int32)

    edit_tensors(before, stack)
    assert_refused(before, UnsupportedError, "model.layers.0.mlp.experts.qweight", "stacked experts")


def test_an_interrupted_conversion_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write(tmp_path / "before", "gptq", model_tuples(), shards=2)
    convert(before, tmp_path / "whole", target_format="marlin")
    real, calls = operation_module.transcode, 0

    def stopping(*args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(operation_module, "transcode", stopping)
        patched.setattr(operation_module, "_COMMIT_BYTES", 1)
        with pytest.raises(KeyboardInterrupt):
            convert(before, tmp_path / "after", target_format="marlin")
    assert not (tmp_path / "after").exists()
    with pytest.raises(OutputError, match="repeat that command"):
        convert(before, tmp_path / "after", target_format="awq")
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "after.partial", damaged)
    calls, counted = 0, []

    def counting(*args: Any) -> torch.Tensor:
        counted.append(args)
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(operation_module, "transcode", counting)
        report = convert(before, tmp_path / "after", target_format="marlin")
    assert report.resumed > 0
    assert len(counted) == 7
    whole, after = tmp_path / "whole", tmp_path / "after"
    assert sorted(path.name for path in whole.iterdir()) == sorted(path.name for path in after.iterdir())
    for path in whole.iterdir():
        assert path.read_bytes() == (after / path.name).read_bytes(), path.name
    # The tensor that was written first: the conversion does not look at it again.
    shutil.rmtree(after)
    partial = damaged.rename(tmp_path / "after.partial")
    last = json.loads((partial / "journal.jsonl").read_text().splitlines()[1].partition(" ")[2])
    name = next(iter(last["written"]))
    info = Checkpoint.open(tmp_path / "whole").tensors[name]
    with (partial / info.shard).open("r+b") as file:
        file.seek(info.offset)
        byte = file.read(1)[0]
        file.seek(info.offset)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} was changed since it was written"):
        convert(before, after, target_format="marlin")
    assert not after.exists()


SUFFIXES = sorted({suffix for layout in INTEGERS.values() for suffix in layout.suffixes} | {"weight"})


@pytest.mark.parametrize(("source", "target"), list(permutations(INTEGERS, 2)))
def test_a_tensor_that_means_something_in_another_layout_is_refused(
    tmp_path: Path, source: str, target: str
) -> None:
    before = write(tmp_path / "before", source, model_tuples())
    stored = all_tensors(before)
    for suffix in SUFFIXES:
        if suffix in INTEGERS[source].suffixes:
            continue
        name = f"{FIRST}.{suffix}"
        save_file({**stored, name: torch.arange(128).half()}, before / "model.safetensors")
        assert_refused(before, CheckpointError, f"tensor {name}", target=target)
        # Beside no quantised module it means nothing until the target's reader sees it.
        name = f"model.layers.0.mlp.router.{suffix}"
        save_file({**stored, name: torch.arange(128).half()}, before / "model.safetensors")
        if suffix in INTEGERS[target].suffixes:
            assert_refused(before, ConversionRefused, f"tensor {name}", target=target)


def test_progress_counts_the_modules(tmp_path: Path) -> None:
    before = write(tmp_path / "before", "gptq", model_tuples())
    seen: list[tuple[str, int, int]] = []
    convert(before, tmp_path / "after", target_format="awq", progress=lambda *step: seen.append(step))
    assert seen[-1] == ("converting", 14, 14)
    assert [step[0] for step in seen] == sorted(
        (step[0] for step in seen), key=("checking", "converting").index
    )
