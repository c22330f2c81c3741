"""Whatever a library raises on a checkpoint's content ends in one line that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2 import TemplateError

from marlinq.calibration import Chat, load_tokenizer, render_chat
from marlinq.core import boundaries, confined
from marlinq.core.errors import CheckpointError, EnvironmentProblem, MarlinqError, UsageError
from marlinq.models import build_blueprint
from marlinq.runtime import generate, load
from tests.testing.runnable_folders import random_quantizer, save_quantized, save_tokenizer
from tests.testing.tiny_models import tiny_model

PanicException = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})


@pytest.mark.parametrize(
    "error",
    [
        ValueError("two\nlines"),
        AssertionError(),
        ZeroDivisionError("division by zero"),
        RecursionError("deep"),
        MemoryError(),
        IndexError("index"),
        TemplateError("template"),
        PanicException("a panic"),
        RuntimeError("x" * 10_000),
    ],
    ids=lambda error: type(error).__name__,
)
def test_anything_becomes_one_line(error: BaseException) -> None:
    with pytest.raises(CheckpointError) as caught, boundaries.tokenizer("folder"):
        raise error
    message = str(caught.value)
    assert message.startswith(f"folder: no usable tokenizer ({type(error).__name__}")
    assert "\n" not in message
    assert len(message) < 400
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("kind", MarlinqError.__subclasses__())
def test_errors_raised_in_python_are_one_line_too(kind: type[MarlinqError]) -> None:
    assert str(kind("--tasks a\nb\x1b[2J.yaml: No such file")) == "--tasks a b\\x1b[2J.yaml: No such file"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), UsageError("ours"), GeneratorExit()])
def test_errors_that_no_file_causes_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, boundaries.forward("folder"):
        raise error
    assert caught.value is error


def test_failures_of_a_device_are_told_apart() -> None:
    with pytest.raises(EnvironmentProblem, match="too little memory"), boundaries.forward("folder"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(EnvironmentProblem, match="too little memory"), boundaries.forward("folder"):
        torch.empty(1 << 50)
    with pytest.raises(torch.AcceleratorError), boundaries.forward("folder"):
        raise torch.AcceleratorError("illegal memory access")


LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NONSENSE: dict[str, dict[str, Any]] = {
    "no heads": {"num_attention_heads": 0},
    "heads that don't divide": {"num_attention_heads": 7},
    "negative size": {"hidden_size": -64},
    "size a string": {"hidden_size": "64"},
    "size a list": {"intermediate_size": [1]},
    "size a fraction": {"vocab_size": 0.5},
    "unknown activation": {"hidden_act": "nothing"},
    "activation a number": {"hidden_act": 3},
    "rope a string": {"rope_parameters": "yes"},
    "rope of an unknown kind": {"rope_scaling": {"rope_type": "twisted", "factor": 1}},
    "padding beyond the vocabulary": {"pad_token_id": 1000},
    "attention of an unknown kind": {"attn_implementation": "magic"},
    "dtype of an unknown kind": {"dtype": "float7"},
    "layer types a number": {"layer_types": 3},
    "label map a list": {"id2label": [1]},
    "model type a list": {"model_type": ["llama"]},
    "not a language model": {"model_type": "vit"},
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_in_a_config_names_the_file(name: str) -> None:
    with pytest.raises(MarlinqError) as caught:
        build_blueprint({**LLAMA, **NONSENSE[name]}, source="somewhere")
    assert str(caught.value).startswith("somewhere")
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def runnable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runnable")
    save_quantized(folder, tiny_model("llama"), "gptq", random_quantizer())
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        '"text"',
        "{}",
        '{"model": null}',
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
        '{"added_tokens": [3]}',
        "[" * 100_000,
    ],
)
def test_nonsense_in_a_tokenizer_names_the_folder(runnable: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes((runnable / "config.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="no usable tokenizer") as caught:
        load_tokenizer(tmp_path)("text")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{% for",
        "{{ raise_exception('no') }}",
        "{{ messages[7].content.x.y }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ [].append.__globals__ }}",
        "{{ messages | nofilter }}",
    ],
)
def test_nonsense_in_a_chat_template_names_the_folder(runnable: Path, template: str) -> None:
    loaded = load(runnable, device="cpu")
    loaded.tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=r"runnable.*the chat template can't be rendered"):
        generate(loaded, "hello", max_new_tokens=1, chat=True)


def test_a_chat_template_that_never_ends_is_stopped(runnable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "SECONDS", 1.0)
    loaded = load(runnable, device="cpu")
    many = "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3
    loaded.tokenizer.chat_template = many
    with pytest.raises(CheckpointError, match=r"can't be rendered \(it took more than 1 s\)"):
        generate(loaded, "hello", max_new_tokens=1, chat=True)
    loaded.tokenizer.chat_template = "{{ 9 ** (9 ** 9) }}"
    with pytest.raises(CheckpointError, match=r"text rows: .*it took more than 1 s"):
        render_chat(Chat(({"role": "user", "content": "a"},)), loaded.tokenizer, "rows")


DOUBLED = "{% set x = namespace(t='a') %}{% for i in range(99) %}{% set x.t = x.t + x.t %}{% endfor %}"


@pytest.mark.parametrize(
    "template", ["{{ 'a' * 10 ** 10 }}", DOUBLED, "{{ 'a' * 100000000 }}", "{{ '%09999999999d' % 1 }}"]
)
def test_a_chat_template_has_little_memory(runnable: Path, template: str) -> None:
    loaded = load(runnable, device="cpu")
    loaded.tokenizer.chat_template = template
    with pytest.raises(CheckpointError, match=r"can't be rendered \((more memory|a text of more than)"):
        generate(loaded, "hello", max_new_tokens=1, chat=True)


def test_nonsense_in_a_generation_config_names_the_file(runnable: Path) -> None:
    path = runnable / "generation_config.json"
    for content in ("[]", "{", "7"):
        path.write_text(content)
        with pytest.raises(CheckpointError, match=r"generation_config\.json: transformers can't read it"):
            load(runnable, device="cpu")
    path.unlink()


def test_a_model_that_can_be_built_and_not_run_names_the_folder(runnable: Path) -> None:
    loaded = load(runnable, device="cpu")
    loaded.model.model.rotary_emb = None
    with pytest.raises(CheckpointError, match=r"runnable.*can't be run on text alone \(AttributeError"):
        generate(loaded, [1, 2, 3], max_new_tokens=1)
