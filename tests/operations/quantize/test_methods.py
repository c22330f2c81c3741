"""Other methods and other widths through every command: quantise, verify, inspect, convert, load, run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint
from marlinq.cli import main
from marlinq.core.errors import UsageError
from marlinq.core.scheme import Scheme
from marlinq.core.settings import Fraction, setting
from marlinq.core.weight import QuantizedWeight
from marlinq.methods import METHODS, Method, MethodOptions, SolveReport, Statistics, register_method
from marlinq.methods.quantity import ErrorQuantity
from marlinq.methods.rtn import round_to_nearest
from marlinq.models import build_blueprint
from marlinq.operations.convert import convert
from marlinq.operations.evaluate import evaluate
from marlinq.operations.inspect import inspect
from marlinq.operations.quantize import QuantizeReport, quantize
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.quantize.solves import try_solver
from marlinq.operations.verify import verify
from marlinq.runtime import generate, load
from tests.runtime.test_generation import wide_model
from tests.testing.interrupted import interrupted
from tests.testing.original_folders import READ, RECIPE, folder_bytes, save_tiny
from tests.testing.recipes import write_recipe
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.schemes import scheme

# Rules of single modules are what is tested, not whether a server takes them.
pytestmark = pytest.mark.filterwarnings("ignore:.*make one layer of them")

TEXT = "It is a truth universally acknowledged, that a byte is a token.\n" * 10
MIXED = (Override.parse("down_proj=scheme=int8"), Override.parse(r"layers\.1\.=scheme=int8,symmetric=false"))


def run(source: Path, out: Path, **changes: Any) -> QuantizeReport:
    return quantize(source, out, recipe=READ.replace(**changes), device="cpu")


def opened(folder: Path) -> QuantizedCheckpoint:
    found = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert found is not None
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("group_size", [32, -1])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_solves_the_layer_it_is_tried_with(
    method: str, group_size: int, device: str, original: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint.open(original)
    blueprint = build_blueprint(checkpoint.config, source="original", tensors=checkpoint.tensors)
    settings: dict[str, Any] = {"group_size": group_size}
    if method == "rtn-static":
        settings = {"scheme": "fp8-static", "format": "compressed-tensors", "group_size": "auto"}
    plan = plan_output(checkpoint, blueprint, RECIPE.replace(method=method, **settings))
    found = []
    solve = type(plan.method).solve

    def kept(*args: Any, **kwargs: Any) -> Any:
        found.extend(solve(*args, **kwargs))
        return found

    monkeypatch.setattr(type(plan.method), "solve", kept)
    try_solver(plan, torch.device(device))
    [(weight, report)] = found
    assert report.fallback is None
    torch.testing.assert_close(weight.dequantize(), torch.ones_like(weight.dequantize()), rtol=0.1, atol=0)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    folder = save_plain(tmp_path / "original", wide_model())
    save_tokenizer(folder)
    return folder


def expected_bits(module: str, mixed: bool) -> int:
    return 8 if not mixed or "down_proj" in module or ".layers.1." in module else 4


@pytest.mark.parametrize("mixed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
def test_eight_bits_through_every_command(original: Path, tmp_path: Path, layout: str, mixed: bool) -> None:
    changes = {"overrides": MIXED} if mixed else {"scheme": "int8"}
    report = run(original, tmp_path / "out", format=layout, **changes)
    view = opened(tmp_path / "out")
    for name, spec in view.modules.items():
        assert spec.scheme.element.bits == report.modules[name].bits == expected_bits(name, mixed), name
    checked = verify(tmp_path / "out", against=original, logits=True, device="cpu")
    assert checked.ok, checked.render()
    assert set(inspect(tmp_path / "out").bits) == {module.bits for module in report.modules.values()}

    other = "compressed-tensors" if layout == "gptq" else "gptq"
    convert(tmp_path / "out", tmp_path / "there", target_format=other)
    convert(tmp_path / "there", tmp_path / "back", target_format=layout)
    for folder in ("there", "back"):
        converted = opened(tmp_path / folder)
        assert converted.modules.keys() == view.modules.keys()
        for name in view.modules:
            assert view.load(name).difference(converted.load(name)) is None
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == view.checkpoint.tensors.keys()

    loaded = load(tmp_path / "out", device="cpu")
    eight = {name for name, module in report.modules.items() if module.bits == 8}
    assert {loaded.decisions[name].operator for name in eight} == {"dense"}
    assert len(generate(loaded, "It is", max_new_tokens=4).tokens) <= 4
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    found = evaluate(tmp_path / "out", against=original, text=str(text), windows=2, length=64, device="cpu")
    assert found.kl is not None


def test_layouts_without_eight_bits_say_so_in_one_line(tmp_path: Path) -> None:
    for layout in ("awq", "marlin"):
        with pytest.raises(UsageError, match=f"{layout} can't hold int8 weights; {layout} holds int4 only"):
            Recipe(format=layout, scheme="int8")
        with pytest.raises(UsageError, match=f"override 'x': {layout} can't hold int8"):
            Recipe(format=layout, overrides=(Override.parse("x=scheme=int8"),))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_rounding_reads_no_text_and_runs_no_block(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny(name, tmp_path / "model")

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a forward pass, or a text")

    for place in (
        "prepare.planned_text",
        "gather_text.share_documents",
        "gather_text.note_text",
        "solve.own_batches",
    ):
        monkeypatch.setattr(f"marlinq.operations.quantize.{place}", forbidden)
    for place in ("record", "run", "inputs"):
        monkeypatch.setattr(f"marlinq.models.BlockReplay.{place}", forbidden)
    report = run(source, tmp_path / "out", method="rtn", calibration=str(tmp_path / "absent.txt"))
    assert report.calibration is None
    assert "the method needs no text" in report.render()
    # Its settings are its own: no quality says anything of them.
    assert "quality" not in report.render()
    assert {module.tokens for module in report.modules.values()} == {0}
    view, tensors = opened(tmp_path / "out"), load_file(source / "model.safetensors")
    for module in view.modules:
        weight = tensors[f"{module}.weight"]
        rounded = round_to_nearest(weight.t() if name == "gpt2" else weight, scheme())
        assert view.load(module).difference(rounded) is None
    manifest = json.loads((tmp_path / "out" / "marlinq.json").read_text())
    assert (manifest["recipe"]["method"], manifest["recipe"]["clip_search"]) == ("rtn", False)
    assert "calibration" not in manifest["run"]
    assert verify(tmp_path / "out", against=source, device="cpu").ok


def test_an_interrupted_rounding_is_resumed(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    recipe = RECIPE.replace(method="rtn")
    quantize(source, tmp_path / "whole", recipe=recipe, device="cpu")
    interrupted(source, tmp_path / "out", recipe, blocks=2)
    report = quantize(source, tmp_path / "out", recipe=recipe, device="cpu", resume=True)
    assert report.resumed_blocks == 2
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_one_automatic_group_size_serves_every_module(tmp_path: Path) -> None:
    source = save_tiny("llama", tmp_path / "model")
    said: list[str] = []
    recipe = RECIPE.replace(method="rtn", group_size="auto")
    quantize(source, tmp_path / "out", recipe=recipe, device="cpu", message=said.append)
    # The hidden size is 64; the intermediate size alone would take 128.
    told = "group size 64: the largest of 128, 64 and 32 that divides every linear's input channels"
    assert said[0] == f"{told} (64, 128)"
    view = opened(tmp_path / "out")
    for name in ("down_proj", "up_proj"):
        assert view.load(f"model.layers.0.mlp.{name}").channels_per_group == 64
    # Another size for some is a matter of an override, which the others' size then does not depend on.
    mixed = recipe.replace(overrides=(Override.parse("down_proj=group_size=32"),))
    quantize(source, tmp_path / "mixed", recipe=mixed, device="cpu", message=said.append)
    assert f"{told} (64)" in said
    assert opened(tmp_path / "mixed").load("model.layers.0.mlp.down_proj").channels_per_group == 32


def test_modules_of_a_method_without_text_saw_no_fewer_tokens(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    source = save_plain(tmp_path / "model", wide_model())
    save_tokenizer(source)
    recipe = Recipe(
        format="compressed-tensors", calibration=str(text), samples=1, max_length=32,
        overrides=(Override.parse("down_proj=scheme=fp8"),),
    )  # fmt: skip
    report = quantize(source, tmp_path / "out", recipe=recipe, device="cpu", progress=False)
    assert {module.tokens for module in report.modules.values()} == {0, 32}
    assert "modules saw" not in report.render()


@dataclass(frozen=True)
class HalvingOptions(MethodOptions):
    share: float = setting(0.5, Fraction(), "Share of each weight that is kept.")


class TokenCount:
    """Statistics that count."""

    def __init__(self) -> None:
        self.tokens = 0

    def add(self, x: Tensor, mask: Tensor | None = None) -> None:
        self.tokens += x.numel() // x.shape[-1] if mask is None else int(mask.sum())

    def merge(self, other: TokenCount) -> None:
        self.tokens += other.tokens


class Halving(Method[HalvingOptions, TokenCount]):
    """Rounds a share of each weight; a stand-in for a method of somebody else's."""

    name = "halving"
    options = HalvingOptions

    def __init__(self) -> None:
        self.blocks: list[str] = []

    def statistics(
        self, in_features: int, options: HalvingOptions, *, device: torch.device, name: str
    ) -> TokenCount:
        return TokenCount()

    def transform(self, block: nn.Module, options: HalvingOptions) -> None:
        self.blocks.append(type(block).__name__)

    def solve(
        self,
        weights: Any,
        statistics: Statistics | None,
        scheme: Scheme,
        options: HalvingOptions,
        *,
        names: Any,
    ) -> list[tuple[QuantizedWeight, SolveReport]]:
        assert statistics is not None
        report = SolveReport(0.25, ErrorQuantity.WEIGHTS, figures={"share": options.share})
        return [(round_to_nearest(weight * options.share, scheme), report) for weight in weights]


@pytest.fixture
def halving() -> Iterator[Halving]:
    method = Halving()
    register_method(method)
    # Its options are those of the methods there were when it was imported.
    sys.modules.pop("marlinq.cli.quantize", None)
    yield method
    del METHODS["halving"]
    sys.modules.pop("marlinq.cli.quantize", None)


def test_a_method_needs_no_more_than_its_registration(
    tmp_path: Path, halving: Halving, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_tiny("llama", tmp_path / "model")
    recipe = READ.replace(
        method="halving", share=0.75, overrides=(Override.parse("up_proj=share=0.99,scheme=int8"),)
    )
    write_recipe(recipe, tmp_path / "recipe.yaml")
    asked = ["--recipe", str(tmp_path / "recipe.yaml"), "--device", "cpu", "--json"]
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["quantize", str(source), str(tmp_path / "out"), *asked])
    assert ended.value.code == 0
    report = json.loads(capsys.readouterr().out)
    assert halving.blocks == ["LlamaDecoderLayer"] * 6
    assert report["method"] == "halving"
    up = report["modules"]["model.layers.0.mlp.up_proj"]
    assert (up["bits"], up["figures"], up["relative_error"]) == (8, {"share": 0.99}, 0.25)
    assert up["tokens"] == report["calibration"]["tokens"]
    weight = load_file(source / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    gate = opened(tmp_path / "out").load("model.layers.0.mlp.gate_proj")
    assert gate.difference(round_to_nearest(weight * 0.75, scheme())) is None
