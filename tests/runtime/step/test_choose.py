"""Which forward decodes: ours where it is recognised and right, transformers' elsewhere, with the reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Lfm2Config, PreTrainedModel

from marlinq.core.errors import EnvironmentProblem, UnsupportedError
from marlinq.core.progress import ReportProgress, no_progress
from marlinq.models.anatomy import Unrecognised
from marlinq.runtime import LoadedModel, generate, generate_batch, load
from marlinq.runtime.sampling import GREEDY
from marlinq.runtime.step import forward_choice, reference_forward
from marlinq.runtime.step.forward_choice import choose_forward, fixed_cache_refusal, take_decoder
from marlinq.runtime.step.reference_forward import ReferenceForward
from marlinq.runtime.step.transformers_forward import TransformersForward
from tests.testing.runnable_folders import save_plain
from tests.testing.tiny_models import tiny_model


def loaded_of(folder: Path, model: PreTrainedModel) -> LoadedModel:
    save_plain(folder, model)
    loaded = load(folder, device="cpu")
    loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = None
    return loaded


def test_a_recognised_model_runs_through_our_forward(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, tiny_model("qwen3"))
    assert isinstance(choose_forward(loaded, 1, 64), ReferenceForward)
    result = generate(loaded, [5, 6], max_new_tokens=3)
    assert result.step.reason.endswith("our forward in torch")


def test_unrecognised_models_run_through_transformers_and_say_why(tmp_path: Path) -> None:
    loaded = loaded_of(tmp_path, tiny_model("bloom"))
    forward = choose_forward(loaded, 2, 64)
    assert isinstance(forward, TransformersForward)
    assert forward.reason.startswith("transformers' modules: transformer.h.0")
    assert forward.reason in generate(loaded, [5, 6], max_new_tokens=3).step.reason


def test_transformers_forward_has_its_kernels_compiled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[ReportProgress] = []
    monkeypatch.setattr(LoadedModel, "compile_kernels", lambda self, progress: reported.append(progress))
    on_gpu = torch.device("cuda:0")
    unknown = loaded_of(tmp_path / "unknown", tiny_model("bloom"))
    assert isinstance(choose_forward(unknown, 1, 64, no_progress), TransformersForward)
    assert not reported
    choose_forward(replace(unknown, device=on_gpu), 1, 64, no_progress)
    assert reported == [no_progress]


def test_the_samplers_kernel_is_compiled_while_the_forward_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, stages = Event(), []
    asked: list[tuple[object, ...]] = []

    def precompile_sampler(*given: object) -> int:
        asked.append(given)
        assert made.wait(10)
        return 1

    def progress(stage: str, done: int, total: int) -> None:
        stages.append((stage, done, total))
        made.set()

    monkeypatch.setattr(forward_choice, "precompile_sampler", precompile_sampler)
    loaded = loaded_of(tmp_path, tiny_model("llama"))
    with forward_choice.compiled_meanwhile(loaded, GREEDY.shape, progress):
        pass
    assert not asked
    on_gpu = replace(loaded, device=torch.device("cuda:1"))
    # It ends only once the forward is made, so the wait for it is told.
    with forward_choice.compiled_meanwhile(on_gpu, GREEDY.shape, progress):
        assert not stages
    assert asked == [(GREEDY.shape, loaded.dtype, 128, 1)]
    assert stages == [("compiling kernels", done, 1) for done in range(2)]

    def fail(*given: object) -> int:
        raise EnvironmentProblem("no compiler")

    monkeypatch.setattr(forward_choice, "precompile_sampler", fail)
    with (
        pytest.raises(EnvironmentProblem, match="no compiler"),
        forward_choice.compiled_meanwhile(on_gpu, GREEDY.shape, progress),
    ):
        pass


def test_a_forward_that_computes_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No other test has a model of this width: what passed the probe is kept for the process.
    loaded = loaded_of(tmp_path, tiny_model("llama", intermediate_size=320))
    right = reference_forward._LayerParts._mlp
    monkeypatch.setattr(reference_forward._LayerParts, "_mlp", lambda *given: right(*given) * 1.01)
    forward = choose_forward(loaded, 1, 64)
    assert isinstance(forward, TransformersForward)
    assert "model.layers.0 differs from transformers'" in forward.reason


def test_broken_weights_say_nothing_about_the_next_model(tmp_path: Path) -> None:
    # No other test has a model of this width.
    model = tiny_model("llama", intermediate_size=192)
    weight = model.get_parameter("model.layers.0.mlp.down_proj.weight")
    right = weight[0, 0].item()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    broken = loaded_of(tmp_path / "broken", model)
    assert "differs from transformers' by nan" in choose_forward(broken, 1, 64).reason
    with torch.no_grad():
        weight[0, 0] = right
    assert isinstance(choose_forward(loaded_of(tmp_path / "right", model), 1, 64), ReferenceForward)


def test_a_table_of_positions_that_is_too_short_for_the_probe(tmp_path: Path) -> None:
    """The probe would read positions behind the table's end."""
    loaded = loaded_of(tmp_path, tiny_model("gpt2", n_positions=8, max_position_embeddings=8))
    result = generate(loaded, [5, 6, 7], max_new_tokens=20)
    assert "takes 14 positions, and there are 8" in result.step.reason
    assert (len(result.tokens), result.stopped) == (5, "context")


def test_a_capacity_stays_within_what_is_computed_alike(tmp_path: Path) -> None:
    """GPT-2 has a table of 128 positions, fewer than the smallest class of capacities."""
    loaded = loaded_of(tmp_path, tiny_model("gpt2"))
    decoder = take_decoder(loaded, batch=1, tokens=100)
    assert isinstance(decoder.forward, ReferenceForward)
    assert decoder.forward.capacity == 128


def test_rows_without_padding_need_no_mask_in_the_prompt() -> None:
    model = tiny_model("mistral")
    ids = torch.arange(24).view(2, 12)
    lengths = torch.tensor([12, 12], dtype=torch.int32)
    fixed = TransformersForward(model, batch=2, capacity=64, reason="")
    growing = TransformersForward(model, batch=2, capacity=64, reason="", fixed=False)
    for tokens in (None, torch.tensor([50, 60]), torch.tensor([70, 80])):
        found, expected = (
            forward.prefill(ids, lengths) if tokens is None else forward.step(tokens)
            for forward in (fixed, growing)
        )
        # The same float32 sums in another order.
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_models_with_other_state_keep_their_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is not recognised does."""
    monkeypatch.setattr(forward_choice, "_anatomy", lambda loaded: Unrecognised("model", "not recognised"))
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    loaded = loaded_of(tmp_path, AutoModelForCausalLM.from_config(config))
    assert fixed_cache_refusal(loaded.model) == "the model has layers without an ordinary key-value cache"
    alone = generate(loaded, [3, 4, 5], max_new_tokens=6)
    assert "growing cache" in alone.step.reason
    together = generate_batch(loaded, [[3, 4, 5], [6, 7, 8]], max_new_tokens=6)
    assert together.rows[0].tokens == alone.tokens
    with pytest.raises(UnsupportedError, match="prompts of 1 to 3 tokens together"):
        generate_batch(loaded, [[3, 4, 5], [6]], max_new_tokens=6)


def own_state(name: str, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = CONFIG_MAPPING[name](**sizes, **changes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def test_a_model_with_a_cache_of_its_own_kind_makes_it_itself() -> None:
    model = own_state(
        "minimax",
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        block_size=4,
        num_local_experts=2,
        pad_token_id=0,
    )
    forward = TransformersForward(model, batch=1, capacity=64, reason="", fixed=False)
    ids = torch.arange(3, 13)[None]
    found = [forward.prefill(ids[:, :8], torch.tensor([8], dtype=torch.int32))]
    found += [forward.step(ids[:, place]) for place in (8, 9)]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0, 7:]
    # Float32 sums in another order.
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_hands_no_cache_back_is_refused() -> None:
    forward = TransformersForward(own_state("rwkv"), batch=1, capacity=64, reason="", fixed=False)
    with pytest.raises(UnsupportedError, match="RwkvForCausalLM: expected a cache of past tokens"):
        forward.prefill(torch.arange(3, 9)[None], torch.tensor([6], dtype=torch.int32))
