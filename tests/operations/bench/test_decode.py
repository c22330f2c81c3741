"""The decode bench: what it counts, what it says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import CONFIG_MAPPING

from marlinq.cli.bench import decode
from marlinq.core.errors import UsageError
from marlinq.models import build_blueprint
from marlinq.operations.bench import SYNTHETIC, Synthetic, bench_decode, synthetic_model
from marlinq.operations.bench.decode import cache_bytes_per_token, weight_bytes
from marlinq.operations.bench.peers.transformers import CompiledTransformers
from marlinq.operations.bench.synthetic import Head
from marlinq.operations.bench.trace import summarise
from marlinq.runtime import LoadedModel, load
from marlinq.runtime.operator_choice import summarize
from tests.testing.decoders import KNOWN, random_decoder
from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized
from tests.testing.tiny_models import tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer(symmetric=False))
    return tmp_path


def test_counts_and_figures(folder: Path) -> None:
    stages: list[str] = []
    found = bench_decode(
        folder, batches=(1, 2), contexts=(24,), new_tokens=6, device="cpu",
        progress=lambda stage, done, total: stages.append(f"{stage} {done}/{total}"),
    )  # fmt: skip
    assert [(cell.batch, cell.context) for cell in found.cells] == [(1, 24), (2, 24)]
    assert found.load_seconds is not None
    assert any(note.startswith("loaded in") and "blueprint" in note for note in found.notes)
    one, two = found.cells
    # Two key-value heads of 16 channels in three layers, float32.
    cache = 2 * 3 * 2 * 16 * 4
    assert one.step_bytes == found.weight_bytes + 27 * cache
    assert two.step_bytes == found.weight_bytes + 2 * 27 * cache
    assert two.tokens_per_second == pytest.approx(2 / two.step_seconds)
    assert stages[-1] == "decoding 2/2"
    value = json.loads(json.dumps(found.to_dict()))
    assert value["cells"][0]["bandwidth"] == pytest.approx(one.step_bytes / one.step_seconds)
    assert value["cells"][0]["speedup"] is None


def test_the_unquantised_model_is_measured_too(folder: Path) -> None:
    found = bench_decode(folder, contexts=(8,), new_tokens=2, against=("transformers",), device="cpu")
    (cell,) = found.cells
    assert cell.peer_step_seconds is not None
    assert cell.speedup == pytest.approx(cell.peer_step_seconds / cell.step_seconds)
    assert "speedup" in found.render()


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5"])
def test_transformers_decodes_layers_of_other_sizes(name: str) -> None:
    """Keys of latent attention are wider than its values, and delta nets have neither."""
    peer = CompiledTransformers(random_decoder(KNOWN[name]), batch=1, capacity=12, compiled=False)
    ids, found = torch.tensor([[5, 7, 11, 13]]), []
    for _ in range(2):
        peer.prefill(ids)
        peer.steps(4)
        found.append(peer._tokens.clone())
    assert torch.equal(*found)


def test_says_that_no_gpu_was_used(folder: Path) -> None:
    rendered = bench_decode(folder, contexts=(4,), new_tokens=2, device="cpu").render()
    assert "no GPU was used" in rendered
    assert "dense: torch's product with the dequantised weight" in rendered
    assert f"torch {torch.__version__}" in rendered


@pytest.mark.parametrize("head", ["16", "int4"])
def test_a_synthetic_model_has_the_shape_and_finite_logits(head: Head) -> None:
    made = synthetic_model(Synthetic("smollm2-135m", layers=2, group_size=64, head=head), device="cpu")
    assert made.model.config.num_hidden_layers == 2
    assert len(made.decisions) == 14 + (head == "int4")
    logits = made.model(torch.arange(6)[None]).logits
    assert logits.shape == (1, 6, 49152)
    assert bool(torch.isfinite(logits).all())
    assert not any(value.is_meta for value in (*made.model.parameters(), *made.model.buffers()))


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_a_synthetic_model_is_exact_where_its_dtype_was_asked_for(dtype: str | None) -> None:
    made = synthetic_model(Synthetic("smollm2-135m", layers=1, group_size=64), device="cpu", dtype=dtype)
    said = " ".join(summarize(made.decisions.values()))
    assert ("exact float32 products were asked for" in said) == (dtype is not None)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "mxfp4", "nvfp4", "int4-2:4"])
def test_synthetic_models_of_other_schemes(scheme: str) -> None:
    wanted = Synthetic("smollm2-135m", layers=1, group_size=64, scheme=scheme)
    made = synthetic_model(wanted, device="cpu", dtype="float32")
    operators = {"int8": "w8a16", "fp8": "w8a16", "int4-2:4": "sparse-w4a16"}
    operator = operators.get(scheme, "fp4a16")
    assert {decision.operator for decision in made.decisions.values()} == {operator}
    with torch.no_grad():
        logits = made.model(input_ids=torch.arange(5)[None]).logits
    assert logits.isfinite().all()


@pytest.mark.parametrize("head", ["16", "int4"])
def test_a_synthetic_model_of_16_bits_quantises_the_head_alone(head: Head) -> None:
    wanted = Synthetic("smollm2-135m", layers=1, group_size=64, head=head, scheme="16")
    assert list(synthetic_model(wanted, device="cpu").decisions) == (["lm_head"] if head == "int4" else [])


@pytest.mark.parametrize("name", sorted(SYNTHETIC))
def test_every_synthetic_shape_is_a_model(name: str) -> None:
    config = Synthetic(name, layers=1).config()
    blueprint = build_blueprint(config, source=name)
    assert len(blueprint.blocks) == 1
    for projection in blueprint.projections():
        assert projection.in_features % 64 == 0
        # Betas and steps of a delta net have a column a head, and are not quantised.
        assert projection.out_features % 64 == 0 or projection.name.endswith(
            ("in_proj_a", "in_proj_b", ".b_proj")
        )


def test_help_names_every_synthetic_shape() -> None:
    text = decode.help
    assert text is not None
    assert [name for name in sorted(SYNTHETIC) if name not in text] == []


def test_kernels_of_a_profile_are_added_up() -> None:
    found = [
        ("void a<int>(float*)", 0.0, 4.0),
        ("b(int)", 3.0, 5.0),
        ("void a<char>(float*)", 10.0, 12.0),
        ("b(int)", 13.0, 15.0),
    ]
    profile = summarise(found, 2, "trace.json")
    assert [(kernel.name, kernel.launches) for kernel in profile.kernels] == [("a", 1.0), ("b", 1.0)]
    assert [kernel.seconds for kernel in profile.kernels] == pytest.approx([3e-6, 2e-6])
    assert [kernel.share for kernel in profile.kernels] == pytest.approx([0.6, 0.4])
    assert profile.span_seconds == pytest.approx(7.5e-6)
    assert profile.busy_seconds == pytest.approx((5 + 2 + 2) / 2 * 1e-6)


@pytest.mark.parametrize("operator", ["dense", "w4a16"])
def test_weight_bytes_are_those_of_the_linears_and_norms(folder: Path, operator: str) -> None:
    model = load(folder, device="cpu", operator=operator).model
    # q, k, v, o, gate, up, down of three blocks as (K, N); hidden 64, two key-value heads of 16.
    shapes = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)] * 3
    norms_and_head = 4 * (7 * 64 + 64 * 128)
    rotary = sum(buffer.nbytes for name, buffer in model.named_buffers() if "inv_freq" in name)
    if operator == "dense":
        linear_bytes = sum(4 * k * n for k, n in shapes)
    else:
        # Half a byte a code, and a float32 scale and zero for each group of 32; 32 columns grow to 64.
        linear_bytes = sum(k * max(n, 64) // 2 + 2 * 4 * (k // 32) * max(n, 64) for k, n in shapes)
    assert weight_bytes(model, 1) == linear_bytes + norms_and_head + rotary


def test_a_token_in_the_cache_is_a_latent_or_keys_and_values() -> None:
    def cached(name: str) -> int:
        config = CONFIG_MAPPING[SYNTHETIC[name]["model_type"]](**SYNTHETIC[name])
        model = SimpleNamespace(config=config)
        return cache_bytes_per_token(cast(LoadedModel, SimpleNamespace(model=model, dtype=torch.float16)))

    assert cached("glm-4.7-flash") == 47 * (512 + 64) * 2
    assert cached("llama-3-8b") == 32 * 2 * 8 * 128 * 2
    # Only the layers that attend have any.
    assert cached("kimi-linear-48b-a3b") == 7 * (512 + 64) * 2
    assert cached("qwen3.5-27b") == 16 * 2 * 4 * 256 * 2


def test_a_tied_head_is_read_once(tmp_path: Path) -> None:
    tied = load(save_plain(tmp_path, tiny_model("gpt2")), device="cpu").model
    own = sum(parameter.nbytes for parameter in tied.parameters()) - tied.transformer.wpe.weight.nbytes
    assert weight_bytes(tied, 1) == own


def test_only_experts_that_rows_choose_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        **SYNTHETIC["qwen3-30b-a3b"], "vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 64,
        "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 64,
    }  # fmt: skip
    monkeypatch.setattr("marlinq.operations.bench.synthetic.SYNTHETIC", {"small": small})
    model = synthetic_model(Synthetic("small", None, 64), device="cpu").model
    # Three matrices of 64 x 64, half a byte a code, and a float32 scale a column.
    expert = 3 * (64 * 64 // 2 + 64 * 4)
    one, two, many = (weight_bytes(model, batch) for batch in (1, 2, 1000))
    # An expert is none of 8 rows' choices of 2 with a chance of 3/4 a row.
    assert two - one == pytest.approx(8 * expert * (3 / 4 - 9 / 16), abs=4)
    assert many - one == pytest.approx(8 * expert * 3 / 4, abs=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": (1, 0)}, "batch"),
        ({"new_tokens": 0}, "new_tokens"),
        ({"contexts": (100,), "new_tokens": 29}, "129, but .* positions for 128"),
        ({"against": ("nobody",)}, "nobody.* expected transformers"),
        ({"profile": "trace.json"}, "needs a GPU, found cpu"),
    ],
)
def test_wrong_requests_are_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bench_decode(folder, device="cpu", **options)
