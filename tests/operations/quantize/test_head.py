"""The quantised output head: its own, or one that was tied to the embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import marlinq
from marlinq.checkpoint import Checkpoint
from marlinq.core.errors import ConversionRefused, NumericsError, UnsupportedError, UsageError
from marlinq.core.rules import Keep
from marlinq.methods import METHODS, GPTQOptions
from marlinq.methods.gptq import solve_gptq
from marlinq.methods.hessian import HessianAccumulator
from marlinq.methods.rtn import round_to_nearest
from marlinq.models import build_blueprint
from marlinq.operations.convert import convert
from marlinq.operations.evaluate import evaluate
from marlinq.operations.quantize import QuantizeReport, quantize
from marlinq.operations.quantize.output_head import solve_head
from marlinq.operations.quantize.override import Override
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.planning import plan_output
from marlinq.operations.quantize.recipe import Recipe
from marlinq.operations.verify import verify
from marlinq.runtime import load
from marlinq.runtime.quant_linear import QuantLinear
from tests.operations.quantize.test_quantize import open_quantized
from tests.testing.interrupted import Killed, interrupt, steps_of
from tests.testing.original_folders import READ, ROWS, folder_bytes, save_tiny
from tests.testing.pairs import slow_but
from tests.testing.quantized_folders import assert_holds
from tests.testing.tiny_models import CONFIGS

# Rules of single modules are what is tested, not whether a server takes them.
pytestmark = pytest.mark.filterwarnings("ignore:.*make one layer of them")

HEAD = READ.replace(quantize_head="int4")


def save(name: str, folder: Path) -> Path:
    """A tiny model with one block: what is tested stands behind the blocks."""
    return save_tiny(name, folder, blocks=1)


def run(source: Path, out: Path, **changes: Any) -> QuantizeReport:
    return quantize(source, out, recipe=HEAD.replace(**changes), device="cpu")


def head_inputs(folder: Path, documents: list[list[int]]) -> Tensor:
    """Inputs of the quantised model's head, one document after the other."""
    model = load(folder, device="cpu", dtype="float32").model
    seen: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    with torch.no_grad():
        for tokens in documents:
            model(torch.tensor([tokens]), use_cache=False)
    return torch.cat(seen)


# Heads that differ from others: tied, with a bias, a cap or a scale, of another name or width.
HEADS = ("llama", "llama-tied", "gemma2", "phi", "gpt_neox", "opt", "gpt2", "bloom", "cohere")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in HEADS else pytest.mark.slow) for name in CONFIGS]
)
def test_every_architecture(tmp_path: Path, name: str) -> None:
    source = save(name, tmp_path / "model")
    report = run(source, tmp_path / "out")
    assert report.head in report.modules
    assert report.modules[report.head].reason == "quantize_head int4"
    assert report.modules[report.head].tokens == report.calibration["tokens"]
    assert report.head not in report.kept
    manifest = json.loads((tmp_path / "out" / "marlinq.json").read_text())
    tied = AutoConfig.from_pretrained(source).tie_word_embeddings
    assert manifest["head"] == {"module": report.head, "untied": tied}
    assert not AutoConfig.from_pretrained(tmp_path / "out").tie_word_embeddings
    found = verify(tmp_path / "out", against=source, logits=True, device="cpu")
    assert found.ok, found.render()
    assert "linears of the blocks are quantised, and so is the output head" in found.render()


def test_the_embedding_of_a_tied_head_stays_as_it_was(tmp_path: Path) -> None:
    source = save("llama-tied", tmp_path / "model")
    report = run(source, tmp_path / "out")
    before, out = load_file(source / "model.safetensors"), Checkpoint.open(tmp_path / "out")
    assert torch.equal(out.tensor("model.embed_tokens.weight"), before["model.embed_tokens.weight"])
    assert {name for name in out.tensors if name.startswith("lm_head")} == {
        f"lm_head.{suffix}" for suffix in ("qweight", "qzeros", "scales", "g_idx")
    }
    assert out.config["quantization_config"]["lm_head"] is True
    assert "and the output head lm_head with gptq" in report.render()
    assert "lm_head (output head" not in report.render()
    model = load(tmp_path / "out", device="cpu", dtype="float32").model
    assert torch.equal(model.get_input_embeddings().weight, before["model.embed_tokens.weight"])


def test_nested_configs_are_untied_too(tmp_path: Path) -> None:
    source = save("llama-tied", tmp_path / "model")
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source=str(source))
    checkpoint.config["text_config"] = {"tie_word_embeddings": True, "x": 1}
    config = plan_output(checkpoint, blueprint, HEAD).config
    assert config["tie_word_embeddings"] is False
    assert config["text_config"] == {"tie_word_embeddings": False, "x": 1}
    assert plan_output(checkpoint, blueprint, READ).config["text_config"]["tie_word_embeddings"] is True


def test_a_head_without_calibration_is_rounded(tmp_path: Path) -> None:
    source = save("llama-tied", tmp_path / "model")
    run(source, tmp_path / "out", method="rtn")
    quantized = open_quantized(tmp_path / "out")
    weight = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    expected = round_to_nearest(weight, quantized.modules["lm_head"].scheme)
    assert quantized.load("lm_head").difference(expected) is None


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_head_is_calibrated_on_its_own_inputs(tmp_path: Path, name: str) -> None:
    source = save(name, tmp_path / "model")
    report = run(source, tmp_path / "out")
    quantized = open_quantized(tmp_path / "out")
    documents = [json.loads(line)["input_ids"] for line in ROWS.read_text().splitlines()]
    inputs = head_inputs(tmp_path / "out", documents)
    tensors = load_file(source / "model.safetensors")
    weight = tensors["lm_head.weight"] if name == "llama" else tensors["model.embed_tokens.weight"]
    statistics = HessianAccumulator(64, device=torch.device("cpu"), name="head")
    statistics.add(inputs)
    scheme = quantized.modules["lm_head"].scheme
    options = GPTQOptions(act_order="none")
    expected, solved = solve_gptq(weight, statistics.hessian(options.shrinkage), scheme, options)
    # The same sums in another order: a code that lay between two values may fall to the other side.
    assert report.modules["lm_head"].relative_error == pytest.approx(solved.relative_error, rel=1e-3)
    assert (quantized.load("lm_head").codes != expected.codes).float().mean() < 1e-3
    rounded = round_to_nearest(weight, scheme).dequantize()
    found = quantized.load("lm_head").dequantize()
    assert (inputs @ (found - weight).t()).norm() < (inputs @ (rounded - weight).t()).norm()


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_slices_give_what_one_solve_gives(tmp_path: Path, method: str) -> None:
    source = save("llama", tmp_path / "model")
    checkpoint = Checkpoint.open(source)
    blueprint = build_blueprint(checkpoint.config, source=str(source))
    planned = plan_output(checkpoint, blueprint, HEAD.replace(method=method)).head
    assert isinstance(planned, PlannedModule)
    weight = checkpoint.tensor("lm_head.weight")
    statistics = HessianAccumulator(64, device=torch.device("cpu"), name="head")
    statistics.add(torch.randn(300, 64, generator=torch.Generator().manual_seed(3)).cumsum(dim=1))
    gathered = statistics if METHODS[method].calibrated else None

    def solve(rows: int) -> Any:
        return solve_head(planned, weight, gathered, device=torch.device("cpu"), rows=rows)

    (whole, one), (joined, report) = solve(128), solve(48)
    assert joined.codes.shape == whole.codes.shape
    # Products of other shapes round differently, which may turn a code that lay between two values.
    assert (joined.codes != whole.codes).float().mean() < 1e-3
    torch.testing.assert_close(joined.scales.float(), whole.scales.float(), rtol=2e-3, atol=0)
    assert report.relative_error == pytest.approx(one.relative_error, rel=1e-3)
    assert report.norm == pytest.approx(one.norm, rel=1e-5)
    assert report.figures == one.figures


def test_a_damaged_head_is_found(tmp_path: Path) -> None:
    source = save("llama-tied", tmp_path / "model")
    run(source, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    tensors["lm_head.qweight"] = tensors["lm_head.qweight"].roll(1, dims=1)
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "out" / "marlinq.json").unlink()
    found = verify(tmp_path / "out", against=source, device="cpu")
    assert not found.ok
    assert any("lm_head" in check.detail for check in found.checks if check.status == "failed")


def test_a_resumed_run_has_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save("llama-tied", tmp_path / "model")
    stages: dict[str, int] = {}

    def progress(stage: str, done: int, total: int) -> None:
        stages[stage] = stages.get(stage, 0) + 1

    quantize(source, tmp_path / "whole", recipe=HEAD, device="cpu", progress=progress)
    assert list(stages)[-3:-1] == ["quantising blocks", "quantising the output head"]
    expected = folder_bytes(tmp_path / "whole")

    solved: list[str] = []
    solve = METHODS["gptq"].solve

    def noting(*args: Any, names: list[str], **kwargs: Any) -> Any:
        solved.extend(names)
        return solve(*args, names=names, **kwargs)

    monkeypatch.setattr(METHODS["gptq"], "solve", noting)
    steps = steps_of(source, tmp_path / "counted", HEAD)
    # The last steps: the head's four tensors, their commit, that of the copies, the end of the folder and the
    # commit in it.
    for before_the_end, left in ((1, []), (3, []), (4, ["lm_head"]), (6, ["lm_head"])):
        out = tmp_path / f"out-{before_the_end}"
        with pytest.MonkeyPatch.context() as patch:
            interrupt(patch, steps - before_the_end)
            with pytest.raises(Killed):
                quantize(source, out, recipe=HEAD, device="cpu")
        solved.clear()
        quantize(source, out, recipe=HEAD, device="cpu", resume=True)
        assert solved == left
        assert folder_bytes(out) == expected


def test_overrides_are_about_the_head_too(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "model")
    # A head of a few bits more: groups of its own, and 8 bits.
    report = run(source, tmp_path / "a", overrides=(Override.parse("lm_head=scheme=int8,group_size=-1"),))
    assert (report.modules["lm_head"].bits, report.modules["lm_head"].group_size) == (8, -1)
    assert report.modules["lm_head"].reason == "override 'lm_head'"
    assert report.modules["model.layers.0.mlp.up_proj"].bits == 4
    assert load(tmp_path / "a", device="cpu").decisions["lm_head"].operator == "dense"

    skipped = run(source, tmp_path / "b", overrides=(Override.parse("lm_head=skip"),))
    assert skipped.head is None
    assert "lm_head=" not in skipped.render()
    assert skipped.kept["lm_head"] == Keep("override 'lm_head' skips it")
    only = run(source, tmp_path / "c", overrides=(Override.parse("layers=skip"),))
    assert list(only.modules) == ["lm_head"]
    assert only.blocks == 0
    assert verify(tmp_path / "c", against=source, device="cpu").ok


def test_the_head_needs_to_be_asked_for(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "model")
    with pytest.raises(UsageError, match="override 'lm_head': matches no linear"):
        run(source, tmp_path / "out", quantize_head="none", overrides=(Override("lm_head", True),))
    report = run(source, tmp_path / "out", quantize_head="none")
    assert report.head is None
    assert "head" not in json.loads((tmp_path / "out" / "marlinq.json").read_text())


def test_heads_that_a_layout_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"quantize_head int8: awq can't hold int8"):
        Recipe(format="awq", symmetric=False, quantize_head="int8")
    with pytest.raises(UsageError, match="expected one of none, int4, int8"):
        Recipe(quantize_head="int5")
    source = save("llama", tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = tensors[name][:100].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(UnsupportedError, match=r"lm_head: gptq: .*N=100.*override 'lm_head\$=skip'"):
        run(source, tmp_path / "out")


def test_the_only_copy_of_an_embedding_is_not_packed(tmp_path: Path) -> None:
    source = save("llama-tied", tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedError, match=r"'lm_head\.weight': is the only copy of the embedding"):
        run(source, tmp_path / "out")


def test_both_copies_of_a_tied_tensor(tmp_path: Path) -> None:
    source = save("llama-tied", tmp_path / "model")
    run(source, tmp_path / "one")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    run(source, tmp_path / "two")
    one, two = Checkpoint.open(tmp_path / "one"), Checkpoint.open(tmp_path / "two")
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(one.tensor(name), two.tensor(name)) for name in one.tensors)


def test_nan_in_the_head_is_named(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "model")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"][5, 7] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"input_ids": list(range(3, 40))}) + "\n")
    with pytest.raises(NumericsError, match="lm_head: 1 of 8192 weights are NaN"):
        run(source, tmp_path / "out", calibration=str(text), samples=1)


LAYOUTS_OF_THE_HEAD = ("gptq", "gptq-v2", "awq", "marlin", "compressed-tensors")


# Every time two: convert's tests take a quantised head from layout to layout.
@pytest.mark.parametrize("layout", slow_but(LAYOUTS_OF_THE_HEAD, "gptq", "marlin"))
def test_a_quantised_head_converts_to_every_format(tmp_path: Path, layout: str) -> None:
    source = save("llama-tied", tmp_path / "model")
    # Marlin wants N in multiples of 64, which the two small projections are not.
    recipe = HEAD.replace(format=layout, overrides=(Override("[kv]_proj$", skip=True),))
    quantize(source, tmp_path / "made", recipe=recipe, device="cpu")
    made = open_quantized(tmp_path / "made")
    modules = {name: made.load(name) for name in made.modules}
    assert "lm_head" in modules
    for other in LAYOUTS_OF_THE_HEAD:
        if other == layout:
            continue
        convert(tmp_path / "made", tmp_path / other, target_format=other)
        assert_holds(tmp_path / other, other, modules)
    # The others hold the same codes and scales.
    one = LAYOUTS_OF_THE_HEAD[LAYOUTS_OF_THE_HEAD.index(layout) - 1]
    found = verify(tmp_path / one, against=source, device="cpu")
    assert found.ok, found.render()


def test_eight_bits_convert_where_they_can_be_held(tmp_path: Path) -> None:
    source = save("llama-tied", tmp_path / "model")
    run(source, tmp_path / "made", quantize_head="int8", overrides=(Override("[kv]_proj$", skip=True),))
    made = open_quantized(tmp_path / "made")
    modules = {name: made.load(name) for name in made.modules}
    assert modules["lm_head"].element.name == "int8"
    for other in ("gptq-v2", "compressed-tensors"):
        convert(tmp_path / "made", tmp_path / other, target_format=other)
        assert_holds(tmp_path / other, other, modules)
        assert verify(tmp_path / other, against=source, device="cpu").ok
    for other in ("awq", "marlin"):
        with pytest.raises(ConversionRefused, match=rf"{other} can't hold lm_head: .*int8"):
            convert(tmp_path / "made", tmp_path / other, target_format=other)
    # Dequantised, it still has a weight of its own.
    convert(tmp_path / "made", tmp_path / "marlin", target_format="marlin", skip_unsupported=True)
    assert "lm_head.weight" in Checkpoint.open(tmp_path / "marlin").tensors
    loaded = load(tmp_path / "marlin", device="cpu", dtype="float32").model
    expected = modules["lm_head"].dequantize(torch.float32)
    torch.testing.assert_close(loaded.lm_head.weight, expected, rtol=0, atol=0)


def test_a_quantised_head_generates(tmp_path: Path) -> None:
    source = save("llama-tied", tmp_path / "model")
    run(source, tmp_path / "out")
    loaded = load(tmp_path / "out", device="cpu", dtype="float32", operator="w4a16")
    assert isinstance(loaded.model.lm_head, QuantLinear)
    assert loaded.decisions["lm_head"].operator == "w4a16"
    dense = load(tmp_path / "out", device="cpu", dtype="float32", operator="dense")
    ids = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, dense.model(ids).logits, rtol=1e-4, atol=1e-4)
        written = loaded.model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert written.shape == (1, 28)
    measured = evaluate(loaded, against=source, windows=2, length=32, device="cpu", dtype="float32")
    assert measured.kl is not None
    assert 0 < measured.kl < 0.5


def test_transformers_multiplies_with_it_where_marlinq_is_registered(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    marlinq.register()
    request.addfinalizer(marlinq.unregister)
    source = save("llama-tied", tmp_path / "model")
    run(source, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    expected = load(tmp_path / "out", device="cpu", dtype="float32").model
    ids = torch.randint(3, 128, (1, 24), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, rtol=1e-4, atol=1e-4)
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_vllm_finds_the_head_where_modules_are_listed(tmp_path: Path) -> None:
    source = save("llama", tmp_path / "model")
    skips = (Override("[kv]_proj$", skip=True),)
    run(source, tmp_path / "plain", quantize_head="none", overrides=skips)
    run(source, tmp_path / "head", overrides=skips)
    listed = "modules_in_block_to_quantize"
    assert listed in Checkpoint.open(tmp_path / "plain").config["quantization_config"]
    # vLLM takes a head that the list leaves out for an unquantised one; without a list it looks at the files.
    assert listed not in Checkpoint.open(tmp_path / "head").config["quantization_config"]
