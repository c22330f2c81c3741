"""Every scheme and every format that holds it goes through every command."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.core.schemes import SCHEMES
from marlinq.core.weight import QuantizedWeight
from marlinq.formats import FORMATS
from marlinq.runtime import load
from tests.docs.test_format_tables import example
from tests.testing.commands import Run, json_runner
from tests.testing.foreign_floats import (
    as_auto_round,
    as_gptqmodel,
    with_four_bit_inputs,
    with_scales_called,
    with_weights_alone,
)
from tests.testing.mixtures import calibration_text
from tests.testing.pairs import every_value, slow_but
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model

CPU = ("--device", "cpu")
DOWN = "model.layers.0.mlp.down_proj"

MADE = {
    "int8": ("gptq", "gptq-v2", "compressed-tensors"),
    "fp8": ("compressed-tensors",),
    "fp8-dynamic": ("compressed-tensors",),
    "fp8-static": ("compressed-tensors", "fp8", "modelopt"),
    "fp8-block": ("compressed-tensors", "fp8"),
    "mxfp8": ("compressed-tensors",),
    "mxfp4": ("compressed-tensors",),
    "nvfp4": ("compressed-tensors", "modelopt"),
}
"""Formats that hold a scheme."""

HALF_STEP = {"int8": 2**-7, "mxfp4": 2**-2, "nvfp4": 2**-2}
"""Largest error of a weight, relative to the largest weight: half the largest step. int8 has 127 steps; E2M1
has one bit behind the leading one, and an E8M0 scale is up to twice as large as needed; others have E4M3's
three."""


ELSEWHERE = {"gpt-oss", "deepseek-v4"}
"""Formats of one family of models, whose tests are tests/operations/test_stacked_experts.py and
test_deepseek_v4.py."""


def test_every_pair_of_a_scheme_and_a_format_is_here() -> None:
    forms = [
        form
        for form in FORMATS.values()
        if form.read_only is None and form.sparsity is None and form.name not in ELSEWHERE
    ]
    for name, made in MADE.items():
        scheme = SCHEMES[name].example(example(name))
        assert {form.name for form in forms if form.scheme_refusal(scheme) is None} == set(made), name
    assert MADE.keys() == SCHEMES.keys() - {"int4"}  # which most other tests are about


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return json_runner(capsys)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One block, whose widths of 192 and 288 leave the last blocks of 128 ragged."""
    model = tiny_model(
        "llama", seed=3, vocab_size=320, hidden_size=192, intermediate_size=288, num_hidden_layers=1
    )
    folder = save_plain(tmp_path_factory.mktemp("schemes") / "original", model)
    save_tokenizer(folder)
    return folder


def weights(folder: Path) -> dict[str, QuantizedWeight]:
    view = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert view is not None
    return {name: view.load(name) for name in view.modules}


def renamed(dtype: torch.dtype = torch.float32, **names: str) -> Callable[[Path], object]:
    return partial(with_scales_called, names=names, dtype=dtype)


def text_file(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("It is a truth universally acknowledged, that numbers are rounded.\n" * 20)
    return text


def quantize(run: Run, original: Path, out: Path, scheme: str, form: str, *options: object) -> Any:
    # Only static activations are calibrated, by a method of their own.
    text = ("--calibration", text_file(out.parent), "--samples", 1, "--max-length", 32)
    method: tuple[object, ...] = text if scheme == "fp8-static" else ("--method", "rtn")
    if "down_proj=scheme=fp8-static" in options:
        method += text
    fixed = ("--scheme", scheme, "--format", form)
    code, report = run("quantize", original, out, *fixed, *method, *CPU, *options)
    assert code == 0, report
    return report


def use(run: Run, original: Path, out: Path) -> Any:
    """Verifies, reports, evaluates and runs a quantised folder; returns the verification."""
    code, checked = run("verify", out, "--against", original, *CPU)
    assert code == 0, checked
    code, made_page = run("report", out, "--out", out.parent / "report")
    assert code == 0, made_page
    text = ("--text", text_file(out.parent), "--windows", 1, "--length", 16)
    code, measured = run("eval", out, "--against", original, *text, *CPU)
    assert code == 0, measured
    assert 0 <= measured["kl"] < 0.5
    code, said = run("generate", out, "--prompt", "It is", "--max-new-tokens", 2, "--greedy", *CPU)
    assert code == 0, said
    return checked


# Every time: each scheme and each format.
@pytest.mark.parametrize(
    ("scheme", "form"), every_value([(scheme, form) for scheme, forms in MADE.items() for form in forms])
)
def test_a_scheme_goes_through_every_command(
    run: Run, original: Path, tmp_path: Path, scheme: str, form: str
) -> None:
    out = tmp_path / "out"
    quantize(run, original, out, scheme, form)
    made = weights(out)
    assert len(made) == 7
    wide = Checkpoint.open(original).tensor(f"{DOWN}.weight").float()
    error = (made[DOWN].dequantize() - wide).abs()
    assert float(error.max()) <= HALF_STEP.get(scheme, 2**-4) * float(wide.abs().max())
    code, seen = run("inspect", out)
    assert (code, seen["format"]) == (0, form), seen
    (words,) = seen["schemes"]
    assert words.startswith(scheme)
    assert seen["schemes"][words] == 7
    checked = use(run, original, out)
    problems = [each for module in checked["modules"] for each in module["problems"]]
    assert not problems
    loaded = load(out, device="cpu")
    weight = dict(loaded.model.named_modules())[DOWN].weight
    assert torch.equal(weight.float(), made[DOWN].dequantize(weight.dtype).float())
    code, said = run("convert", out, tmp_path / "dense", "--to", "dense")
    assert code == 0, said  # the tiny model is float32, which holds every product
    dense = Checkpoint.open(tmp_path / "dense")
    assert "quantization_config" not in dense.config
    assert torch.equal(dense.tensor(f"{DOWN}.weight"), made[DOWN].dequantize())
    for other in MADE[scheme]:
        if other == form:
            continue
        if scheme == "nvfp4":
            # Second levels that divide are reciprocals of those that multiply, which float32 rounds.
            code, said = run("convert", out, tmp_path / "refused", "--to", other)
            assert code == 5
            assert "--allow-loss" in said["error"]
            code, said = run("convert", out, tmp_path / "rounded", "--to", other, "--allow-loss")
            assert code == 0, said
            for name, found in weights(tmp_path / "rounded").items():
                torch.testing.assert_close(found.dequantize(), made[name].dequantize(), rtol=2**-22, atol=0)
            continue
        there, back = tmp_path / f"to-{other}", tmp_path / f"back-from-{other}"
        for source, target, name in ((out, there, other), (there, back, form)):
            code, said = run("convert", source, target, "--to", name)
            assert code == 0, said
        assert weights(there).keys() == made.keys()
        for name, found in weights(there).items():
            assert made[name].difference(found) is None, name
        stored = [load_file(folder / "model.safetensors") for folder in (out, back)]
        assert stored[0].keys() == stored[1].keys()
        for name, tensor in stored[0].items():
            assert torch.equal(tensor.float(), stored[1][name].float()), name


MIXED = ("(gate|up)_proj=scheme=int8", "down_proj=scheme=fp8", "o_proj=scheme=nvfp4")
FOREIGN: dict[str, tuple[str, str, tuple[str, ...], Callable[[Path], object] | None]] = {
    "int8, asymmetric": ("int8", "compressed-tensors", ("--asym",), None),
    "int8, a scale a channel": ("int8", "gptq", ("--group-size", "-1"), None),
    "mixed": ("int4", "compressed-tensors", MIXED, None),
    "mixed, modelopt": ("nvfp4", "modelopt", ("down_proj=scheme=fp8-static",), None),
    "mixed, gptq": ("int4", "gptq", ("(gate|up)_proj=scheme=int8",), None),
    "auto-round": ("int4", "gptq", ("down_proj=scheme=int8",), partial(as_auto_round, eight_bits=DOWN)),
    "divided, channels": ("fp8", "compressed-tensors", (), as_gptqmodel),
    "divided, blocks": ("fp8-block", "fp8", (), as_gptqmodel),
    "naive-quantized": ("fp8", "compressed-tensors", (), with_weights_alone),
    "weight_scale": ("fp8-block", "fp8", (), renamed(weight_scale_inv="weight_scale")),
    "qscale_weight": (
        "fp8-static", "fp8", (),
        renamed(weight_scale_inv="qscale_weight", activation_scale="qscale_act"),
    ),
    "scale": ("mxfp4", "fp8", (), renamed(torch.float8_e8m0fnu, weight_scale_inv="scale")),
    "exponents": ("mxfp4", "fp8", (), renamed(torch.float8_e8m0fnu)),
    "bfloat16 scales": ("mxfp4", "fp8", (), renamed(torch.bfloat16)),
    "4-bit inputs": ("nvfp4", "compressed-tensors", (), with_four_bit_inputs),
    "4-bit inputs, modelopt": ("nvfp4", "modelopt", (), with_four_bit_inputs),
}  # fmt: skip
"""Checkpoints that other tests do not make -> the scheme and format that they are made of, options and
overrides of that run, and what rewrites the folder as another program writes it. MXFP4 becomes blocks of FP8
whose scales are powers of two."""


@pytest.mark.parametrize("name", slow_but(FOREIGN, "mixed", "scale", "4-bit inputs, modelopt"))
@pytest.mark.filterwarnings("ignore:.*is quantised already")
def test_what_others_write_goes_through_every_command(
    run: Run, original: Path, tmp_path: Path, name: str
) -> None:
    scheme, form, options, rewritten = FOREIGN[name]
    overrides = [each for option in options if "=" in option for each in ("--override", option)]
    plain = [option for option in options if "=" not in option]
    out = tmp_path / "out"
    if (scheme, form) == ("mxfp4", "fp8"):
        quantize(run, original, tmp_path / "mxfp4", scheme, "compressed-tensors")
        code, said = run("convert", tmp_path / "mxfp4", out, "--to", form, "--scheme", "fp8-block")
        assert code == 0, said
    else:
        quantize(run, original, out, scheme, form, *plain, *overrides)
    before = {name: weight.dequantize() for name, weight in weights(out).items()}
    if rewritten is not None:
        rewritten(out)
    made = weights(out)
    assert made.keys() == before.keys()
    for module, weight in made.items():
        # Reciprocals of scales are rounded to float32.
        torch.testing.assert_close(weight.dequantize(), before[module], rtol=2**-22, atol=0)
    code, seen = run("inspect", out, "--modules")
    assert code == 0, seen
    assert {module["name"] for module in seen["modules"]} == made.keys()
    use(run, original, out)
    code, said = run("convert", out, tmp_path / "dense", "--to", "dense")
    assert code == 0, said
    assert torch.equal(Checkpoint.open(tmp_path / "dense").tensor(f"{DOWN}.weight"), made[DOWN].dequantize())
    again = ("--scheme", "int8", "--format", "compressed-tensors", "--method", "rtn")
    code, said = run("quantize", out, tmp_path / "again", *again, *CPU)
    assert code == 0, said
    anew = weights(tmp_path / "again")[DOWN].dequantize()
    # Half a step of 127, and a scale in bfloat16.
    most = float(made[DOWN].dequantize().abs().max())
    assert float((anew - made[DOWN].dequantize()).abs().max()) <= most * (1 / 254 + 2**-8)


WIDENED = (("mxfp4", "mxfp8"), ("mxfp4", "fp8-block"), ("nvfp4", "fp8-dynamic"))


@pytest.mark.parametrize("schemes", slow_but(WIDENED, WIDENED[0]), ids="-".join)
def test_weights_with_more_bits_than_they_were_made_with_are_clean(
    run: Run, original: Path, tmp_path: Path, schemes: tuple[str, str]
) -> None:
    """They are as far from the original as FP4, four times as far as FP8 that is made of it."""
    source, target = schemes
    quantize(run, original, tmp_path / source, source, "compressed-tensors")
    to = ("--to", "compressed-tensors", "--scheme", target)
    code, said = run("convert", tmp_path / source, tmp_path / target, *to, "--allow-loss")
    assert code == 0, said
    code, checked = run("verify", tmp_path / target, "--against", original, "--logits", *CPU)
    assert code == 0, checked
    rows = {row["name"]: row["status"] for row in checked["checks"]}
    assert rows["weights"] == rows["logits"] == "passed", checked


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_fp4_by_gptq_is_better_and_raises_no_alarm(run: Run, tmp_path: Path, scheme: str) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 1}
    original = save_plain(tmp_path / "original", tiny_model("llama", seed=3, **sizes))
    save_tokenizer(original)
    options = ("--scheme", scheme, "--format", "compressed-tensors", "--drift-correction", 0)
    text = ("--calibration", calibration_text(tmp_path), "--samples", 4, "--max-length", 64)
    code, report = run("quantize", original, tmp_path / "gptq", *options, *text, *CPU)
    assert code == 0, report
    # The error of outputs, of which rounding to nearest would leave 1 % (half a step of E2M1, squared).
    assert {module["quantity"] for module in report["modules"].values()} == {"outputs"}
    assert max(module["relative_error"] for module in report["modules"].values()) < 0.01
    code, checked = run("verify", tmp_path / "gptq", "--against", original, *CPU)
    assert code == 0, checked
    assert [row for row in checked["checks"] if row["status"] in ("failed", "warning")] == []
