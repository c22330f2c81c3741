"""GPT-OSS checkpoints, whose files hold a layer's MXFP4 experts in one tensor, through every command."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import marlinq
from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, StackingWriter
from marlinq.core.errors import CheckpointError, ConversionRefused
from marlinq.operations.convert import convert
from marlinq.operations.evaluate import evaluate
from marlinq.operations.inspect import inspect
from marlinq.operations.quantize import Recipe, quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.report import written_report as report
from marlinq.operations.verify import verify
from marlinq.runtime import generate, load
from tests.testing.faults import one_up, passes, planted
from tests.testing.mixtures import calibration_text, save_mixture
from tests.testing.whole_models import assert_same_bytes, logits, tensors_of

EXPERTS = "model.layers.1.mlp.experts"
STACK = f"{EXPERTS}.gate_up_proj_blocks"
OTHERS = (Override("self_attn", skip=True),)
Plant = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``original``, ``stacked``, which is quantised from it, and ``compressed``, converted from that."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    save_mixture(folder / "original", "gpt-oss")
    recipe = Recipe(method="rtn", scheme="mxfp4", format="gpt-oss", overrides=OTHERS)
    quantize(folder / "original", folder / "stacked", recipe=recipe, device="cpu", progress=False)
    convert(folder / "stacked", folder / "compressed", target_format="compressed-tensors", progress=False)
    return folder


def test_transformers_reads_what_is_written(root: Path) -> None:
    stored = tensors_of(root / "stacked")
    assert stored[STACK].shape == (4, 64, 2, 16)
    assert stored[f"{EXPERTS}.down_proj_scales"].shape == (4, 64, 1)
    view = QuantizedCheckpoint.of(Checkpoint.open(root / "stacked"))
    assert view is not None
    assert len(view.modules) == 2 * 4 * 3
    both = convert_moe_packed_tensors(
        stored[STACK], stored[f"{EXPERTS}.gate_up_proj_scales"], dtype=torch.float32
    )
    for expert in range(4):
        for offset, part in enumerate(("gate_proj", "up_proj")):
            mine = view.load(f"{EXPERTS}.{expert}.{part}").dequantize()
            assert torch.equal(mine, both[expert][:, offset::2].t())
    theirs = AutoModelForCausalLM.from_pretrained(root / "stacked", dtype=torch.bfloat16).eval()
    ours = load(root / "stacked", device="cpu", dtype="bfloat16", exact=True).model
    assert torch.equal(theirs.model.layers[1].mlp.experts.gate_up_proj.float(), both)
    # The same weights; only experts' sums are added up in another order, in bfloat16: a rounding of 2**-9 for
    # each of about ten operations on the residual stream.
    difference = (logits(ours).float() - logits(theirs).float()).norm()
    assert float(difference / logits(theirs).float().norm()) < 10 * 2**-9


def test_every_command_takes_it(root: Path, tmp_path: Path) -> None:
    stacked = root / "stacked"
    seen = inspect(stacked, progress=False)
    assert (seen.format, seen.quantized_modules) == ("gpt-oss", 24)
    checked = verify(stacked, against=root / "original", device="cpu", progress=False)
    assert [check for check in checked.checks if check.status in ("failed", "warning")] == []
    assert verify(root / "compressed", against=stacked, device="cpu", progress=False).ok
    text = str(calibration_text(tmp_path))
    measured = evaluate(
        stacked, against=root / "original", text=text, windows=1, length=16, device="cpu", progress=False
    )
    assert measured.kl is not None
    assert 0 < measured.kl < 0.5
    loaded = load(stacked, device="cpu", progress=False)
    assert len(generate(loaded, "It is", max_new_tokens=2).tokens) == 2
    assert report.report(stacked, out=tmp_path / "page", progress=False)
    recipe = Recipe(method="rtn", scheme="int8", format="compressed-tensors", group_size=32)
    with pytest.warns(UserWarning, match="quantised already"):
        quantize(stacked, tmp_path / "int8", recipe=recipe, device="cpu", progress=False)
    convert(stacked, tmp_path / "dense", target_format="dense", progress=False)
    found = logits(load(tmp_path / "dense", device="cpu", dtype="float32", progress=False).model)
    torch.testing.assert_close(
        found, logits(load(stacked, device="cpu", dtype="float32", progress=False).model)
    )


def test_conversion_there_and_back_keeps_every_byte(root: Path, tmp_path: Path) -> None:
    convert(root / "compressed", tmp_path / "back", target_format="gpt-oss", progress=False)
    assert_same_bytes(root / "stacked", tmp_path / "back")


@pytest.mark.parametrize(
    ("form", "scheme"),
    [
        ("modelopt", "nvfp4"),
        pytest.param("compressed-tensors", "nvfp4", marks=pytest.mark.slow),
        ("compressed-tensors", "mxfp8"),
        pytest.param("compressed-tensors", "fp8-block", marks=pytest.mark.slow),
    ],
)
def test_other_schemes_hold_the_same_weights(root: Path, tmp_path: Path, form: str, scheme: str) -> None:
    """Down projections are as wide as an MX group."""
    report = convert(root / "stacked", tmp_path / "out", target_format=form, scheme=scheme, progress=False)
    assert not report.lossy
    views = [QuantizedCheckpoint.of(Checkpoint.open(path)) for path in (root / "stacked", tmp_path / "out")]
    assert views[0] is not None
    assert views[1] is not None
    assert views[0].modules.keys() == views[1].modules.keys()
    for name in views[0].modules:
        assert torch.equal(views[0].load(name).dequantize(), views[1].load(name).dequantize()), name
    assert verify(tmp_path / "out", against=root / "stacked", device="cpu", progress=False).ok


@pytest.mark.parametrize("kind", ["quantize", "convert"])
def test_an_interrupted_run_ends_with_the_same_bytes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def run(**options: bool) -> None:
        if kind == "convert":
            convert(root / "compressed", tmp_path / "out", target_format="gpt-oss", progress=False)
        else:
            recipe = Recipe(method="rtn", scheme="mxfp4", format="gpt-oss", overrides=OTHERS)
            quantize(
                root / "original", tmp_path / "out", recipe=recipe, device="cpu", progress=False, **options
            )

    write, stop = StackingWriter.write, f"{EXPERTS}.2.up_proj.weight_packed"

    def stopping(writer: StackingWriter, name: str, tensor: Tensor) -> None:
        if name == stop:
            raise KeyboardInterrupt
        write(writer, name, tensor)

    with monkeypatch.context() as patched:
        patched.setattr(StackingWriter, "write", stopping)
        with pytest.raises(KeyboardInterrupt):
            run()
    run(**({"resume": True} if kind == "quantize" else {}))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        root / "stacked" / "model.safetensors"
    ).read_bytes()


def change(name: str, to: Callable[[Tensor], Tensor]) -> Plant:
    return lambda tensors: tensors.update({name: to(tensors[name]).contiguous()})


SCALES, DOWN = f"{EXPERTS}.gate_up_proj_scales", f"{EXPERTS}.down_proj"


def without_down(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{DOWN}_blocks"], tensors[f"{DOWN}_scales"]


def one_sign(stack: Tensor) -> Tensor:
    flat = stack.flatten().clone()
    flat[77] ^= 0x08
    return flat.reshape(stack.shape)


FAULTS: dict[str, Plant] = {
    "scales missing": lambda tensors: tensors.pop(SCALES),
    "codes missing": lambda tensors: tensors.pop(f"{DOWN}_blocks"),
    "down projections missing": without_down,
    "an expert missing": change(STACK, lambda stack: stack[:-1]),
    "codes of three axes": change(STACK, lambda stack: stack.flatten(2)),
    "other bytes a block": change(STACK, lambda stack: stack.reshape(4, 64, 4, 8)),
    "gate rows before up rows": change(STACK, lambda x: torch.cat((x[:, 0::2], x[:, 1::2]), dim=1)),
    "gate and up exchanged": change(STACK, lambda x: x.unflatten(1, (-1, 2)).flip(2).flatten(1, 2)),
    "nibbles exchanged": change(STACK, lambda stack: (stack << 4) | (stack >> 4)),
    "two experts exchanged": change(STACK, lambda stack: stack[[1, 0, 2, 3]]),
    "FP4 as FP8": change(STACK, lambda stack: stack.view(torch.float8_e4m3fn)),
    "exponents turned over": change(f"{DOWN}_scales", lambda scales: 254 - scales),
    "scales transposed": change(SCALES, lambda x: x.transpose(1, 2).reshape(x.shape)),
    "one scale twice what it was": change(f"{DOWN}_scales", one_up),
    "exponents off by the bias": change(f"{DOWN}_scales", lambda scales: scales - 7),
    "a scale is NaN": change(f"{DOWN}_scales", lambda x: x.index_fill(0, torch.tensor([1]), 255)),
    "one bit of a code": change(STACK, one_sign),
}


QUICK = (
    "scales missing",
    "an expert missing",
    "gate rows before up rows",
    "two experts exchanged",
    "one bit of a code",
)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAULTS]
)
def test_planted_faults_are_found(root: Path, tmp_path: Path, name: str) -> None:
    faulty = planted(root / "stacked", tmp_path / "faulty", FAULTS[name])
    assert not passes(faulty, root / "original")


def test_stacks_that_no_loader_reads_are_refused(root: Path, tmp_path: Path) -> None:
    whole = Recipe(method="rtn", scheme="mxfp4", format="gpt-oss")
    with pytest.raises(
        ConversionRefused, match=r"self_attn.* no linear of an expert.*--override 'self_attn=skip'"
    ):
        quantize(root / "original", tmp_path / "out", recipe=whole, device="cpu", progress=False)
    save_mixture(tmp_path / "other", "qwen3-moe")
    recipe = Recipe(method="rtn", scheme="mxfp4", format="gpt-oss", overrides=OTHERS)
    with pytest.raises(ConversionRefused, match="gate_up_proj_bias; only models of GPT-OSS"):
        quantize(tmp_path / "other", tmp_path / "out", recipe=recipe, device="cpu", progress=False)
    assert not list(tmp_path.glob("out*"))
    tensors = tensors_of(root / "stacked")
    tensors[STACK] = tensors[STACK].view(torch.int8)
    shutil.copytree(root / "stacked", tmp_path / "damaged")
    save_file(tensors, tmp_path / "damaged" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="gate_up_proj_blocks: expected uint8"):
        load(tmp_path / "damaged", device="cpu", progress=False)


def test_from_pretrained_runs_it_on_our_operators(root: Path) -> None:
    marlinq.register()
    try:
        model = AutoModelForCausalLM.from_pretrained(root / "stacked", dtype=torch.float32)
    finally:
        marlinq.unregister()
    ours = load(root / "stacked", device="cpu", dtype="float32", progress=False).model
    assert torch.equal(logits(model), logits(ours))
