"""Byte codes with block scales and nibble codes with two levels go through every command (float_toys.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.cli import main
from marlinq.core.errors import CheckpointError
from marlinq.core.granularity import Granularity
from marlinq.core.weight import QuantizedWeight
from marlinq.runtime import load
from tests import float_toys
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model

CPU = ("--device", "cpu")
DOWN = "model.layers.0.mlp.down_proj"
Run = Callable[..., tuple[int, Any]]


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with float_toys.registered():
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``marlinq ARGUMENTS --json`` in this process: the exit code and the object that it prints."""

    def call(*arguments: object) -> tuple[int, Any]:
        with pytest.raises(SystemExit) as exit_info:
            main([*map(str, arguments), "--json"])
        printed = capsys.readouterr().out
        return int(exit_info.value.code or 0), json.loads(printed[printed.index("{") :])

    return call


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One block, whose widths of 192 and 288 leave the last blocks of 128 ragged."""
    model = tiny_model(
        "llama", seed=3, vocab_size=320, hidden_size=192, intermediate_size=288, num_hidden_layers=1
    )
    folder = save_plain(tmp_path_factory.mktemp("floats") / "original", model)
    save_tokenizer(folder)
    return folder


def weights(folder: Path) -> dict[str, QuantizedWeight]:
    view = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert view is not None
    return {name: view.load(name) for name in view.modules}


def quantize(run: Run, original: Path, out: Path, layout: str) -> None:
    scheme = "fp8-block" if "block" in layout else "nvfp4"
    code, report = run(
        "quantize", original, out, "--format", layout, "--scheme", scheme, "--method", "rtn", *CPU
    )
    assert code == 0, report


def goes_through_all_commands(run: Run, original: Path, out: Path) -> None:
    """inspect, verify, report, eval and generate, and that the two operators agree on the logits."""
    code, seen = run("inspect", out)
    assert code == 0, seen
    code, checked = run("verify", out, "--against", original, *CPU)
    assert code == 0, checked
    problems = [each for module in checked["modules"] for each in module["problems"]]
    # Exchanged words and scales are looked for among integer codes.
    assert all("not judged" in problem for problem in problems), problems
    code, made = run("report", out, "--out", out.parent / f"{out.name}-report")
    assert code == 0, made
    code, measured = run("eval", out, "--against", original, "--windows", 1, "--length", 16, *CPU)
    assert code == 0, measured
    assert 0 <= measured["kl"] < 1
    code, said = run("generate", out, "--prompt", "It is", "--max-new-tokens", 2, "--greedy", *CPU)
    assert code == 0, said
    loaded = load(out, device="cpu")
    weight = dict(loaded.model.named_modules())[DOWN].weight
    assert torch.equal(weight.float(), weights(out)[DOWN].dequantize(weight.dtype).float())


def convert(run: Run, source: Path, target: Path, layout: str) -> Path:
    code, said = run("convert", source, target, "--to", layout)
    assert code == 0, said
    return target


def same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(weight.difference(second[name]) is None for name, weight in first.items())


def test_bytes_with_block_scales(run: Run, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "blocks"
    quantize(run, original, out, "toy-blocks")
    made = weights(out)
    assert len(made) == 7
    assert {weight.granularity for weight in made.values()} == {Granularity.block(128, 128)}
    assert made[DOWN].scales.shape == (3, 2)
    wide = Checkpoint.open(original).tensor(f"{DOWN}.weight").float()
    # E4M3 has three bits behind the leading one: values are rounded by at most 1/16, or half the least step.
    step = made[DOWN].scales.amax() * 2**-10
    bound = torch.maximum(wide.abs() / 16, step)
    assert bool(((made[DOWN].dequantize() - wide).abs() <= bound).all())
    goes_through_all_commands(run, original, out)

    # From bytes to words and back; the scales of blocks travel too.
    there = convert(run, out, tmp_path / "words", "toy-block-words")
    back = convert(run, there, tmp_path / "back", "toy-blocks")
    same_weights(out, there)
    stored = [load_file(folder / "model.safetensors") for folder in (out, back)]
    assert stored[0].keys() == stored[1].keys()
    for name, tensor in stored[0].items():
        assert torch.equal(tensor.view(torch.uint8), stored[1][name].view(torch.uint8)), name
    # No layout of integers takes them, and each says so.
    code, said = run("convert", out, tmp_path / "never", "--to", "compressed-tensors")
    assert code == 5
    assert "fp8_e4m3 weights" in said["error"]


def test_nibbles_with_scales_of_two_levels(run: Run, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "nibbles"
    quantize(run, original, out, "toy-nibbles")
    made = weights(out)
    assert {weight.scheme.scale_dtype for weight in made.values()} == {"float8_e4m3fn"}
    assert {weight.scheme.tensor_scale for weight in made.values()} == {"multiplies"}
    for weight in made.values():
        # The second level lets the largest scale be the largest E4M3 number, up to its own rounding.
        assert float(weight.scales.float().max()) == 448
    goes_through_all_commands(run, original, out)

    swapped = convert(run, out, tmp_path / "swapped", "toy-nibbles-swapped")
    same_weights(out, swapped)
    key = f"{DOWN}.n_codes"
    one, other = (load_file(folder / "model.safetensors")[key] for folder in (out, swapped))
    assert torch.equal((one >> 4) | (one << 4), other)
    # A scale that multiplies is not its reciprocal.
    code, said = run("convert", out, tmp_path / "never", "--to", "toy-nibbles-divided")
    assert code == 5
    assert "a second-level scale that multiplies" in said["error"]


def test_second_levels_that_divide_are_the_reciprocal(run: Run, original: Path, tmp_path: Path) -> None:
    for layout in ("toy-nibbles", "toy-nibbles-divided"):
        quantize(run, original, tmp_path / layout, layout)
    times, by = weights(tmp_path / "toy-nibbles"), weights(tmp_path / "toy-nibbles-divided")
    for name, weight in by.items():
        assert weight.scheme.tensor_scale == "divides"
        assert times[name].tensor_scale is not None
        torch.testing.assert_close(weight.tensor_scale, 1 / times[name].tensor_scale)
        # Rounding of a reciprocal moves a weight by no more than a few units in the last place.
        torch.testing.assert_close(weight.dequantize(), times[name].dequantize(), rtol=1e-6, atol=0)
    assert run("verify", tmp_path / "toy-nibbles-divided", "--against", original, *CPU)[0] == 0


def test_activations_are_carried_or_refused(run: Run, original: Path, tmp_path: Path) -> None:
    out = tmp_path / "blocks"
    quantize(run, original, out, "toy-blocks")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["dynamic_activations"] = True
    (out / "config.json").write_text(json.dumps(config))
    described = next(iter(weights(out).values())).scheme.describe()
    assert described.endswith("dynamic fp8_e4m3 activations, groups of 128 per token")
    there = convert(run, out, tmp_path / "words", "toy-block-words")
    assert json.loads((there / "config.json").read_text())["quantization_config"]["dynamic_activations"]
    same_weights(out, there)
    float_toys.LAYOUTS["toy-block-words"].holds_activations = False
    code, said = run("convert", out, tmp_path / "never", "--to", "toy-block-words")
    assert code == 5
    assert "describes weights only" in said["error"]


def test_a_module_is_known_by_dtype_and_rules_where_codes_are_called_weight(
    run: Run, original: Path, tmp_path: Path
) -> None:
    out = tmp_path / "blocks"
    quantize(run, original, out, "toy-blocks")
    view = QuantizedCheckpoint.of(Checkpoint.open(out))
    assert view is not None
    assert "model.embed_tokens.weight" in view.passthrough
    assert "lm_head" in view.unquantized_linears()
    # A byte matrix that the config says nothing about is an error, not a dense weight.
    tensors = load_file(out / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="lm_head: is quantised, but quantization_config excludes it"):
        QuantizedCheckpoint.of(Checkpoint.open(out))


def with_fault(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change one stored tensor of a folder, as damage or another program would."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def nan_code(stored: torch.Tensor) -> torch.Tensor:
    codes = stored.view(torch.uint8).clone()
    codes[5, 7] = 0x7F
    return codes.view(stored.dtype)


@pytest.mark.parametrize(
    ("layout", "suffix", "change", "says"),
    [
        ("toy-blocks", "weight", nan_code, "1 of 55296 codes stand for NaN"),
        ("toy-blocks", "block_scales", torch.zeros_like, "6 of 6 scales are zero"),
        ("toy-nibbles", "n_second", torch.zeros_like, "the second-level scale is 0.0"),
        ("toy-nibbles", "n_second", lambda scale: scale * torch.nan, "the second-level scale is nan"),
        ("toy-nibbles", "n_second", torch.reciprocal, "error"),
        ("toy-nibbles-divided", "n_second", torch.reciprocal, "error"),
    ],
)
def test_faults_of_values_are_found(
    run: Run,
    original: Path,
    tmp_path: Path,
    layout: str,
    suffix: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    says: str,
) -> None:
    out = tmp_path / layout
    quantize(run, original, out, layout)
    (out / "marlinq.json").unlink()  # whose hashes would find anything
    with_fault(out, f"{DOWN}.{suffix}", change)
    code, checked = run("verify", out, "--against", original, *CPU)
    assert code != 0
    (faulty,) = [module for module in checked["modules"] if module["name"] == DOWN]
    assert any(says in problem for problem in faulty["problems"]), faulty


@pytest.mark.parametrize("options", [("--group-size", 64), ("--method", "gptq")])
def test_what_the_layout_or_the_method_can_not_do_is_refused_early(
    run: Run, original: Path, tmp_path: Path, options: tuple[object, ...]
) -> None:
    rest = () if "--method" in options else ("--method", "rtn")
    code, said = run(
        "quantize",
        original,
        tmp_path / "x",
        "--format",
        "toy-blocks",
        "--scheme",
        "fp8-block",
        *options,
        *rest,
        *CPU,
    )
    assert code != 0
    wanted = "integers only" if "gptq" in options else "holds scales per block only"
    assert wanted in said["error"]
