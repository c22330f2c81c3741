"""A config or tokenizer that is not the original's: the same weights then compute something else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marlinq.checkpoint import Checkpoint
from marlinq.operations.verify import settings, verify
from marlinq.operations.verify.settings import check_settings
from marlinq.operations.verify.verification_report import Check
from tests.testing.runnable_folders import save_tokenizer

ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def edited(folder: Path, out: Path, changes: Mapping[str, Any]) -> Path:
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    (out / "config.json").write_text(json.dumps(config))
    return out


def row(folder: Path, original: Path) -> Check:
    report = verify(folder, against=original, device="cpu")
    return next(check for check in report.checks if check.name == "settings")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', the original's is 'silu'"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps"),
        ({"num_attention_heads": 8, "head_dim": 16, "num_key_value_heads": 4}, "num_attention_heads is 8"),
        ({"rope_parameters": {**ROPE, "rope_theta": 500.0}}, "rope_parameters.rope_theta is 500.0"),
        (
            {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 8.0}},
            "rope_parameters.factor is 8.0",
        ),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "model_type is 'mistral'"),
    ],
    ids=lambda value: value.partition(" ")[0] if isinstance(value, str) else "",
)
def test_other_settings_of_the_model_fail(
    original: Path, quantized: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    check = row(edited(quantized("gptq"), tmp_path / "out", changes), original)
    assert check.status == "failed"
    assert any(named in problem for problem in check.problems or (check.detail,))


@pytest.mark.parametrize(
    "changes",
    [{"max_position_embeddings": 32}, {"eos_token_id": 3}, {"architectures": ["GPT2LMHeadModel"]}],
)
def test_limits_of_the_text_and_names_are_warnings(
    original: Path, quantized: Callable[..., Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert row(edited(quantized("gptq"), tmp_path / "out", changes), original).status == "warning"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"transformers_version": "4.0.0", "use_cache": False, "attention_dropout": 0.5},
        # Other versions of transformers spell these otherwise, or leave defaults out.
        {"rope_parameters": ..., "rope_theta": 10000.0, "head_dim": ..., "mlp_bias": ...},
        {"made_by": "somebody"},
    ],
)
def test_what_changes_no_output_passes(
    original: Path, quantized: Callable[..., Path], tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert row(edited(quantized("gptq"), tmp_path / "out", changes), original).status == "passed"


ATTENTION = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e6}
VISION = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "num_heads": 4}
QWEN_VL = {"model_type": "qwen2_vl", **ATTENTION, "vision_config": VISION}
TWO = {"num_hidden_layers": 2}
WINDOWS = {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": False, "sliding_window": 8}
GEMMA = {"model_type": "gemma3_text", "hidden_size": 64}


def compared(original: Path, ours: Mapping[str, Any], others: Mapping[str, Any]) -> Check:
    checkpoint = Checkpoint.open(original)
    mine, theirs = (replace(checkpoint, config=dict(each), tensors={}) for each in (ours, others))
    return check_settings(mine, theirs, False)


@pytest.mark.parametrize(
    ("ours", "others"),
    [
        (
            {"model_type": "llama", "rope_parameters": {**ROPE, "rope_type": "linear", "factor": 8.0}},
            {"model_type": "llama", "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 8.0}},
        ),
        (
            {
                **QWEN_VL,
                "rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [2, 3, 3]},
            },
            {**QWEN_VL, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
        ),
        # No code for the model: what only one of the files says may be a default.
        (
            {"model_type": "absent", "rope_scaling": {"type": "yarn", "rope_type": "yarn"}},
            {"model_type": "absent", "rope_scaling": {"type": "yarn"}},
        ),
        (
            {"model_type": "absent", "vision_config": {"depth": 2, "hidden_act": "gelu"}},
            {"model_type": "absent", "vision_config": {"depth": 2}},
        ),
        ({"model_type": "jamba", "use_mamba_kernels": False}, {"model_type": "jamba"}),
        ({**WINDOWS, "max_window_layers": 2}, {**WINDOWS, "max_window_layers": 28}),
        # Windows begin behind the last layer.
        (
            {**WINDOWS, "use_sliding_window": True, "max_window_layers": 4},
            {**WINDOWS, "use_sliding_window": True, "max_window_layers": 5},
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1, 0], "no_rope_layer_interval": 2, **TWO},
            {"model_type": "smollm3", "no_rope_layers": [1, 0], **TWO},
        ),
        (
            {
                "model_type": "llama4_text",
                "attention_chunk_size": 64,
                "layer_types": ["full_attention"] * 2,
                **TWO,
            },
            {"model_type": "llama4_text", "layer_types": ["full_attention"] * 2, **TWO},
        ),
        (
            {"model_type": "llama4_text", "moe_layers": [1], "interleave_moe_layer_step": 2, **TWO},
            {"model_type": "llama4_text", "moe_layers": [1], **TWO},
        ),
        ({"model_type": "mixtral", "router_jitter_noise": 0.01}, {"model_type": "mixtral"}),
    ],
    ids=[
        *("linear", "mrope", "yarn unparsed", "nested unparsed", "kernels"),
        *("no windows", "windows behind the last layer", "intervals", "chunks", "steps", "noise"),
    ],
)
def test_other_spellings_of_the_same_settings_pass(
    original: Path, ours: dict[str, Any], others: dict[str, Any]
) -> None:
    assert compared(original, ours, others).status == "passed"
    assert compared(original, others, ours).status == "passed"


@pytest.mark.parametrize(
    ("common", "key", "values"),
    [
        ({**WINDOWS, "use_sliding_window": True}, "max_window_layers", (2, 3)),
        # Both have windows in the same layers; servers look at the number.
        (
            {**WINDOWS, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4},
            "max_window_layers",
            (0, 4),
        ),
        ({"model_type": "smollm3", **TWO}, "no_rope_layer_interval", (1, 2)),
        ({"model_type": "llama4_text", **TWO}, "attention_chunk_size", (64, 128)),
        ({"model_type": "llama4_text", **TWO}, "interleave_moe_layer_step", (1, 2)),
        # A class that does not know the list.
        ({"model_type": "absent", "layer_types": ["full_attention"]}, "max_window_layers", (0, 1)),
    ],
)
def test_layers_that_differ_through_a_setting_fail(
    original: Path, common: dict[str, Any], key: str, values: tuple[int, int]
) -> None:
    check = compared(original, *({**common, key: value} for value in values))
    assert check.status == "failed"
    assert any(key in problem for problem in check.problems or (check.detail,))


def test_what_differs_in_older_spellings_fails(original: Path) -> None:
    ropes = [{"type": "mrope", "mrope_section": section} for section in ([2, 3, 3], [4, 2, 2])]
    check = compared(original, *({**QWEN_VL, "rope_scaling": rope} for rope in ropes))
    assert check.status == "failed"
    assert "mrope_section" in check.detail
    kinds = [{"model_type": "absent", "rope_scaling": {"type": kind}} for kind in ("yarn", "linear")]
    assert "rope_scaling.rope_type is 'yarn'" in compared(original, *kinds).detail


@pytest.mark.parametrize(
    ("model", "key"),
    [("deepseek_v4", "num_nextn_predict_layers"), ("gemma3", "text_config.made_by")],
)
def test_a_draft_head_left_out_and_unknown_settings_are_warnings(
    original: Path, model: str, key: str
) -> None:
    inner, _, last = key.rpartition(".")
    both = [{last: number} for number in (0, 1)]
    configs = [{"model_type": model, **({inner: {**GEMMA, **each}} if inner else each)} for each in both]
    check = compared(original, *configs)
    assert check.status == "warning"
    assert key in check.detail


@pytest.mark.parametrize("failing", ["get_vocab", "__call__"])
def test_a_tokenizer_whose_own_code_fails_is_a_warning(
    original: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    class Words:
        name_or_path = "words"

        def get_vocab(self) -> dict[str, int]:
            return {"a": 1}

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1]}

    def fail(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(Words, failing, fail)
    monkeypatch.setattr(settings, "same_tokenizer_files", lambda mine, theirs: False)
    monkeypatch.setattr(settings, "read_tokenizer", lambda checkpoint, trust_remote_code: Words())
    checkpoint = Checkpoint.open(original)
    check = check_settings(checkpoint, checkpoint, False)
    assert check.status == "warning"
    assert check.detail.startswith("tokenizer: can't be compared: words")


def test_a_tokenizer_with_other_numbers_fails(
    original: Path, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(original, model)
    shutil.copytree(quantized("gptq"), out)
    for folder in (model, out):
        save_tokenizer(folder)
    assert row(out, model).status == "passed"
    tokenizer = json.loads((out / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = sorted(words, key=words.__getitem__)[-2:]
    words[first], words[second] = words[second], words[first]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))
    check = row(out, model)
    assert check.status == "failed"
    assert "2 tokens with other numbers" in check.detail
    (out / "tokenizer.json").unlink()
    (out / "tokenizer_config.json").unlink(missing_ok=True)
    assert row(out, model).status == "warning"
