"""Shapes from configs, times beside measured ones, what is recommended."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from marlinq.cli.recommend import command
from marlinq.core.errors import CheckpointError, UnsupportedError, UsageError
from marlinq.kernels.contract.device import H200
from marlinq.models import build_blueprint
from marlinq.operations.bench.synthetic import Synthetic
from marlinq.operations.quantize import Recipe, quantize
from marlinq.operations.recommend import Recommendation, gpus, recommend, save_plot, step_times
from marlinq.operations.recommend.divergence import known_quality
from marlinq.operations.recommend.gpus import find_gpu
from marlinq.operations.recommend.server_verdicts import loaders
from marlinq.operations.recommend.shape import ModelShape, ProductSize, shape_of
from marlinq.operations.recommend.weight_types import compared
from tests.runtime.test_generation import wide_model
from tests.testing.decoders import KNOWN
from tests.testing.mixtures import random_mixture
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import CONFIGS, tiny_model

RESULTS = Path(__file__).parents[3] / "docs" / "results"
KINDS = {kind.name: kind for kind in compared()}
NEAR = 0.15
"""Largest relative error of a step's time on the GPU that the model was fitted to."""


@cache
def shape(name: str) -> ModelShape:
    return shape_of(name, Synthetic(name).config())


def results(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "schemes"),
    [
        ("llama-3-8b", {"16", "int4", "int8", "fp8"}),
        ("gemma-3-4b", {"16", "int4", "int8", "fp8"}),
        ("qwen3-30b-a3b", {"int4"}),  # no constant was fitted to its steps
    ],
)
def test_steps_are_those_of_bench_decode(name: str, schemes: set[str]) -> None:
    rows = [row for row in results("recommend-h200.json")["rows"] if row["shape"] == name]
    assert {row["scheme"] for row in rows} == schemes
    off = {}
    for row in rows:
        kind = KINDS[{"16": "16 bits", "int4": "int4 g128"}.get(row["scheme"], row["scheme"])]
        context = row["context"] + row["new_tokens"] / 2
        for batch, step in zip(row["batches"], row["step_ms"], strict=True):
            expected = step_times.decode(shape(name), kind, find_gpu("h200"), batch, context).step
            off[row["scheme"], batch] = 1e3 * expected / step - 1
    assert len(off) == (3 if name == "qwen3-30b-a3b" else 4 * len(schemes))
    assert max(map(abs, off.values())) < NEAR, off


def test_steps_of_one_sequence_of_other_shapes() -> None:
    for run in results("decode-shapes-h200.json")["shapes"]:
        name = run["checkpoint"].split()[1].rstrip(",")
        (cell,) = run["cells"]
        times = step_times.decode(
            shape(name), KINDS["int4 g128"], find_gpu("h200"), 1, cell["context"] + run["new_tokens"] / 2
        )
        assert times.step == pytest.approx(cell["step_seconds"], rel=NEAR), name
        if name == "llama-3-70b":  # the bench counts norms too, and its cache without windows
            assert times.step_bytes == pytest.approx(cell["step_bytes"], rel=0.01)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gemma2", "mixtral", "deepseek-v3", "qwen3.5-moe", "nemotron-h"]
)
def test_a_shape_has_every_weight_of_the_model(name: str) -> None:
    made = tiny_model(name) if name in CONFIGS else random_mixture(name)
    config = made.config.to_dict()
    found = shape_of(name, config)
    blueprint = build_blueprint(config, source=name)
    total = sum(math.prod(each) for each in blueprint.parameters.values())
    assert found.others + sum(count * n * k for (n, k), count in found.sizes.items()) == total
    assert found.depth == len(blueprint.blocks)
    assert step_times.weight_bytes(found, KINDS["16 bits"]) == 2 * total
    in_layers = sum(
        count
        * (
            sum(one.n * one.k for one in layer.products)
            + (layer.routed.experts * layer.routed.weights if layer.routed else 0)
        )
        for layer, count in found.layers
    )
    assert in_layers == total - found.others


def test_experts_without_a_kernel_of_ours_take_what_peaks_allow() -> None:
    gpu, kind = find_gpu("l40s"), KINDS["int4 g128"]
    found = step_times.decode(shape("qwen3-30b-a3b"), kind, gpu, 512, 128)
    assert gpu.bandwidth * found.step > found.step_bytes


def test_layers_of_known_shapes() -> None:
    ((layer, count),) = shape("llama-3-8b").layers
    assert count == 32
    assert ProductSize((4096, 1024, 1024), 4096) in layer.products
    assert ProductSize((14336, 14336), 4096) in layer.products
    assert (layer.norms, layer.cached, layer.window, layer.routed) == (2, 2048, None, None)
    gemma = shape("gemma-3-4b")
    assert {layer.window for layer, _ in gemma.layers} == {1024, None}
    assert {layer.norms for layer, _ in gemma.layers} == {4}
    assert gemma.cached(4096, windows=True) < gemma.cached(4096, windows=False) == 4096 * 34 * 2 * 4 * 256
    ((mixture, _),) = shape("qwen3-30b-a3b").layers
    assert mixture.routed is not None
    assert (mixture.routed.experts, mixture.routed.top, mixture.routed.inner) == (128, 8, 768)
    assert mixture.routed.touched(1) == pytest.approx(8)


def test_heads_may_differ_between_layers() -> None:
    decoder = KNOWN["gemma-4"]
    found = shape_of("model", {"model_type": decoder.model_type, **decoder.config})
    heads = decoder.config["num_attention_heads"]
    assert [layer.queries for layer, _ in found.layers] == [heads * 16, heads * 32]


def test_bytes_of_weights_count_their_scales() -> None:
    n, k = 256, 512
    expected = {
        "16 bits": 2.0,
        "int8": 1 + 2 / 128,
        "fp8": 1 + 2 / k,
        "int4 g32": 0.5 + 2 / 32,
        "int4 g128": 0.5 + 2 / 128,
        "nvfp4": 0.5 + 1 / 16,
        "mxfp4": 0.5 + 1 / 32,
    }
    for name, each in expected.items():
        assert KINDS[name].bytes_of(n, k) == pytest.approx(n * k * each)
    # Groups that do not divide K become smaller ones.
    assert KINDS["int4 g128"].bytes_of(n, 576) == n * 576 * (0.5 + 2 / 64)


def test_gpus_are_published_figures_and_one_is_measured() -> None:
    assert find_gpu("H200").device() is H200
    for gpu in gpus().values():
        assert gpu.source
        device = gpu.device()
        assert device.measured == (gpu.key == "h200")
        assert 0.85 * gpu.bandwidth < device.bandwidth < gpu.bandwidth
        assert gpu.fp8 is None or 1.9 < gpu.fp8 / gpu.half < 2.1
    (option,) = (each for each in command.params if each.name == "gpu")
    assert all(key in option.help for key in gpus())  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="--gpu abacus: not known; expected one of h200"):
        find_gpu("abacus")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Recommendation:
    """The recommendation for a folder with nothing but a config."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(tiny_model("llama").config.to_dict()))
    return recommend(
        str(folder), batch=16, context=64, prompt=32, servers=("vLLM", "marlinq"), progress=False
    )


def test_a_recommendation_needs_only_the_config(found: Recommendation) -> None:
    assert [one.name for one in found.candidates] == list(KINDS)
    assert all(one.fits and one.step_seconds and one.prefill_seconds for one in found.candidates)
    assert found.choice in KINDS
    rendered = found.render()
    assert "steps were checked with bench decode on an H200" in rendered
    assert f"at batch 16 take {found.choice}" in rendered
    assert "int4 2:4 sparse: left out" in rendered
    assert json.loads(json.dumps(found.to_dict()))["choice"] == found.choice
    assert {loader.server for one in found.candidates for loader in one.loaders} == {"vLLM", "marlinq"}


def test_the_roofline_is_a_picture(found: Recommendation, tmp_path: Path) -> None:
    save_plot(replace(found, model="a<b & c"), tmp_path / "roof.svg")
    tree = ElementTree.parse(tmp_path / "roof.svg")
    lines = [each for each in tree.iter() if each.get("class") == "curve"]
    assert len(lines) == len(KINDS)
    text = " ".join(each.text or "" for each in tree.iter())
    assert "a<b & c" in text
    for each in lines:
        for pair in (each.get("points") or "").split():
            x, y = map(float, pair.split(","))
            assert 70 <= x <= 630
            assert 60 <= y <= 400


def test_the_batch_from_which_four_bits_are_slower_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlinq.operations.recommend.recommend_weights.AXIS", (1, 64, 256))
    found = recommend("llama-3-8b", synthetic=True, context=128, progress=False)
    assert found.until in (64, 256)
    assert any(f"from batch {found.until} on" in line for line in found.advice)
    assert found.choice in ("int4 g128", "int4 g64")
    steps = {one.name: [point.step_seconds for point in one.points] for one in found.candidates}
    assert steps["int4 g128"][0] < steps["fp8"][0] < steps["16 bits"][0]
    assert all(one == sorted(one) for one in steps.values())
    small = recommend("llama-3-70b", synthetic=True, gpu="4090", progress=False)
    assert small.choice is None
    assert "nothing fits" in small.advice[0]
    assert "published peaks" in small.render()


def test_quality_on_the_model_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marlinq.operations.recommend.recommend_weights.AXIS", (1,))
    monkeypatch.setattr("marlinq.operations.recommend.divergence._WINDOWS", 1)
    folder = save_plain(tmp_path / "model", wide_model())
    save_tokenizer(folder)
    found = recommend(str(folder), measured=True, device="cpu", progress=False)
    kl = {one.name: one.quality.kl for one in found.candidates if one.quality is not None}
    assert set(kl) == set(KINDS)
    assert 0 < kl["int8"] < kl["int4 g32"]
    assert kl["16 bits"] == 0


def test_experts_that_are_packed_cannot_be_measured(tmp_path: Path) -> None:
    folder = save_plain(tmp_path / "model", random_mixture("qwen3-moe"))
    recipe = Recipe(method="rtn", group_size=32, format="compressed-tensors")
    quantize(folder, tmp_path / "int4", recipe=recipe, device="cpu", progress=False)
    save_tokenizer(tmp_path / "int4")
    with pytest.raises(UnsupportedError, match=r"experts\.0\.\S+ is quantised; pass the original, or"):
        recommend(str(tmp_path / "int4"), measured=True, device="cpu", progress=False)


def test_large_batches_that_fit_nothing_are_no_matter_of_width() -> None:
    found = recommend("llama-3-8b", synthetic=True, gpu="4090", progress=False)
    assert found.until == 64
    assert not any(point.fits for one in found.candidates for point in one.points if point.batch >= 64)
    assert "from batch 64 on 4 bits are no faster, but nothing fits the memory there" in found.advice


def test_quality_is_that_of_the_results() -> None:
    measured = {row["weights"]: row["novels"] for row in results("quality-schemes-h200.json")["rows"]}
    for name, row in {
        "int8": "INT8, 64", "fp8": "FP8", "int4 g32": "INT4, 32", "int4 g64": "INT4, 64",
        "nvfp4": "NVFP4", "mxfp4": "MXFP4",
    }.items():  # fmt: skip
        quality = known_quality(name)
        assert quality is not None
        assert quality.kl == measured[row]
        assert quality.model == "SmolLM2-135M"  # rows of different models could not be compared
    # Linears of 576 channels have no groups of 128; FP8 activations were not measured.
    assert known_quality("int4 g128") is None
    assert known_quality("fp8-dynamic") is None


def save_mixture(folder: Path, name: str) -> Path:
    """A tiny mixture with a tokenizer."""
    save_plain(folder, random_mixture(name))
    save_tokenizer(folder)
    return folder


def test_native_weights_of_gpt_oss_are_experts_in_mxfp4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marlinq.operations.recommend.recommend_weights.AXIS", (1, 4))
    monkeypatch.setattr("marlinq.operations.recommend.recommend_weights.compared", lambda: (KINDS["mxfp4"],))
    monkeypatch.setattr("marlinq.operations.recommend.divergence._WINDOWS", 1)
    folder = save_mixture(tmp_path / "model", "gpt-oss")
    found = recommend(
        str(folder), servers=("vllm", "sglang"), measured=True, device="cpu", context=64, progress=False
    )
    whole, native = found.candidates
    assert native.name == "mxfp4 experts"
    assert {one.server: one.loads for one in whole.loaders} == {"vLLM": False, "SGLang": False}
    assert {one.server: one.loads for one in native.loaders} == {"vLLM": True, "SGLang": True}
    assert found.choice == "mxfp4 experts"
    assert "mxfp4 experts: in gpt-oss, other weights in 16 bits" in found.render()
    assert whole.quality is not None
    assert native.quality is not None
    assert 0 < native.quality.kl != whole.quality.kl
    config = json.loads((folder / "config.json").read_text())
    shape = shape_of("model", config)
    others = sum(
        (2 - 0.5 - 1 / 32) * one.out_features * one.in_features
        for one in shape.projections
        if "experts" not in one.name
    )
    assert native.weight_bytes == pytest.approx(whole.weight_bytes + others)
    assert all(a.step_seconds > b.step_seconds for a, b in zip(native.points, whole.points, strict=True))
    assert native.prefill_seconds is not None


def test_weights_in_16_bits_are_loaded_by_what_runs_models() -> None:
    names = {one.server for one in loaders(shape("llama-3-8b"), KINDS["16 bits"], ())}
    assert names == {"marlinq", "vLLM", "SGLang", "transformers"}


def test_models_that_are_quantised_already_are_told(found: Recommendation, tmp_path: Path) -> None:
    assert not any("quantised already" in line for line in found.advice)
    config = tiny_model("llama").config.to_dict() | {"quantization_config": {"quant_method": "fp8\x1b[2J"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = recommend(str(tmp_path), batch=16, context=64, prompt=32, progress=False)
    (line,) = [line for line in told.advice if "quantised already (fp8" in line]
    assert "\x1b" not in line
    assert [one.step_seconds for one in told.candidates] == [one.step_seconds for one in found.candidates]


def test_wrong_requests_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--servers nobody: not known"):
        recommend("llama-3-8b", synthetic=True, servers=("nobody",), progress=False)
    with pytest.raises(UsageError, match="leave out --synthetic"):
        recommend("llama-3-8b", synthetic=True, measured=True, progress=False)
    with pytest.raises(UsageError, match="a local folder, which has no revision 'main'"):
        recommend(str(tmp_path), revision="main", progress=False)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        recommend(str(tmp_path), progress=False)


@pytest.mark.parametrize(
    ("model_type", "wrong"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 0}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": -5}),
        ("mixtral", {"num_local_experts": 10**6}),
        ("llama", {"num_hidden_layers": 10**9}),
        ("qwen3_moe", {"hidden_size": 1 << 26}),
        ("qwen3_moe", {"num_attention_heads": 1 << 26}),
        ("llama", {"sliding_window": "x"}),
        ("llama", {"kv_lora_rank": 10**30}),
        ("llama", {"kv_lora_rank": [1]}),
    ],
)
def test_absurd_counts_are_named(model_type: str, wrong: dict[str, object]) -> None:
    key, value = list(wrong.items())[-1]
    with pytest.raises(
        CheckpointError, match=f"config.json: {key}: expected .*, found {re.escape(repr(value))}"
    ):
        shape_of("model", {"model_type": model_type, **wrong})


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "bert"}, "bert is an encoder, which fills masks"),
        ({"model_type": "roberta", "architectures": ["RobertaForMaskedLM"]}, "roberta is an encoder"),
        (
            {"model_type": "gpt2", "architectures": ["GPT2Model"], "n_layer": 2},
            "GPT2Model has no output head",
        ),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, "no output head|no language model"),
        ({"model_type": "t5"}, "encoder-decoder"),
    ],
)
def test_models_that_write_no_text_are_refused(config: dict[str, object], why: str) -> None:
    small = {"num_hidden_layers": 2} if config["model_type"] in ("bert", "roberta") else {}
    with pytest.raises(UnsupportedError, match=why):
        shape_of("model", {**config, **small})


def test_layers_without_attention_keep_no_cache() -> None:
    mamba = {"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 99}
    found = shape_of("model", {**mamba, "architectures": 7})
    assert (found.stateful, found.depth) == (2, 2)
    assert found.cached(4096, windows=False) == 0
    assert loaders(found, KINDS["int8"], ("vllm",))
    assert shape("llama-3-8b").stateful == 0


def test_of_equal_layers_and_experts_servers_judge_a_few() -> None:
    found = shape("qwen3-30b-a3b")
    assert len(found.projections) == 48 * (4 + 3 * 128)
    assert len(found.judged) == 4 + 3 * 4
    for name in ("fp8-dynamic", "nvfp4", "mxfp4"):
        (verdict,) = loaders(found, KINDS[name], ("sglang",))
        assert verdict.loads, verdict.reason
    for verdict in loaders(found, KINDS["int4 g128"], ()):
        assert "more)" not in verdict.reason
