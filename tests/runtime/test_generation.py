"""Decoding: the same tokens as one forward over the whole text, stopping, sampling, streaming."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from marlinq.core.display import plain
from marlinq.core.errors import CheckpointError, NumericsError, UnsupportedError, UsageError
from marlinq.runtime import LoadedModel, Sampling, generate, load
from marlinq.runtime.generation import TextStream, generate_batch
from marlinq.runtime.operators import OPERATORS
from marlinq.runtime.step.forward_choice import fixed_cache_refusal
from marlinq.runtime.step.transformers_forward import TransformersForward
from tests.testing.runnable_folders import random_quantizer, save_plain, save_quantized, save_tokenizer
from tests.testing.tiny_models import tiny_model

PROMPT = [1, 9, 30, 77]


def wide_model(name: str = "llama") -> PreTrainedModel:
    """A tiny model whose vocabulary holds all 256 bytes."""
    return tiny_model(name, seed=3, vocab_size=320)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_quantized(tmp_path, wide_model(), "gptq", random_quantizer())
    save_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load(folder, device="cpu")


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without a cache: the whole text again for each token."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def set_ends(loaded: LoadedModel, ends: list[int] | None) -> None:
    loaded.model.generation_config.eos_token_id = ends
    loaded.model.config.eos_token_id = ends


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "bloom", "gemma2"])
def test_greedy_tokens_are_those_of_forwards_without_a_cache(name: str, tmp_path: Path) -> None:
    save_plain(tmp_path, tiny_model(name))
    loaded = load(tmp_path, device="cpu")
    set_ends(loaded, None)
    result = generate(loaded, PROMPT, max_new_tokens=24)
    assert list(result.tokens) == greedy(loaded.model, PROMPT, 24)
    assert result.stopped == "length"
    assert result.step.mode == "eager"


def test_stops_at_the_end_token(loaded: LoadedModel) -> None:
    set_ends(loaded, None)
    free = generate(loaded, PROMPT, max_new_tokens=12)
    end = free.tokens[5]
    set_ends(loaded, [end, 319])
    result = generate(loaded, PROMPT, max_new_tokens=12)
    assert result.tokens == free.tokens[: free.tokens.index(end) + 1]
    assert result.stopped == "eos"


def test_rows_stop_behind_a_text_that_ends_them(loaded: LoadedModel) -> None:
    set_ends(loaded, None)
    free = generate_batch(loaded, ["a cat", "Ä"], max_new_tokens=12).rows
    wanted = free[0].text[2:4]
    first, second = generate_batch(loaded, ["a cat", "Ä"], max_new_tokens=12, until=[wanted, "x" * 20]).rows
    assert first.stopped == "text"
    assert free[0].text.startswith(first.text)
    assert first.text.index(wanted) + len(wanted) == len(first.text)
    if wanted not in free[1].text:
        assert second.tokens == free[1].tokens


def test_stops_where_positions_end(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=128, n_positions=16, n_embd=64, n_layer=1, n_head=2)
    save_plain(tmp_path, AutoModelForCausalLM.from_config(config))
    loaded = load(tmp_path, device="cpu")
    set_ends(loaded, None)
    result = generate(loaded, PROMPT, max_new_tokens=100)
    assert (len(result.tokens), result.stopped) == (12, "context")
    with pytest.raises(UsageError, match="16 tokens, the model has positions for 16"):
        generate(loaded, [3] * 16)


def test_products_that_are_rounded_further_are_told(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cpu, float32\n" in f"{generate(loaded, PROMPT, max_new_tokens=1).render()}\n"
    monkeypatch.setattr(OPERATORS["dense"], "rounds_to", OPERATORS["int4pack"].rounds_to)
    assert "cpu, float32, products in bfloat16" in generate(loaded, PROMPT, max_new_tokens=1).render()


def test_sampling_follows_the_seed(loaded: LoadedModel) -> None:
    set_ends(loaded, None)
    draws = [
        generate(loaded, PROMPT, max_new_tokens=16, sampling=Sampling(temperature=1.5, seed=seed))
        for seed in (1, 1, 2)
    ]
    assert draws[0].tokens == draws[1].tokens != draws[2].tokens
    cold = generate(loaded, PROMPT, max_new_tokens=16, sampling=Sampling(temperature=1e-3))
    assert cold.tokens == generate(loaded, PROMPT, max_new_tokens=16).tokens


def test_streams_exactly_the_text(loaded: LoadedModel) -> None:
    set_ends(loaded, None)
    pieces: list[str] = []
    hot = Sampling(temperature=3.0)
    result = generate(loaded, "Ärger", max_new_tokens=40, sampling=hot, on_text=pieces.append)
    assert "".join(pieces) == result.text == loaded.tokenizer.decode(result.tokens, skip_special_tokens=True)
    assert result.prompt_tokens == 6


def test_stream_waits_for_whole_characters(folder: Path) -> None:
    tokenizer = save_tokenizer(folder)
    text = "a Ä 猫🐈!"
    tokens = tokenizer(text)["input_ids"]
    stream = TextStream(tokenizer, tokenizer("é")["input_ids"])
    pieces = [stream.push(token) for token in tokens]
    assert [piece for piece in pieces if piece] == list(text)
    assert pieces.count("") == len(tokens) - len(text)
    assert stream.finish() == ""
    assert stream.push(tokenizer("🐈")["input_ids"][0]) == ""
    assert stream.finish() == "\ufffd"


def test_figures_and_decisions_are_reported(loaded: LoadedModel) -> None:
    result = generate(loaded, PROMPT, max_new_tokens=4)
    value = json.loads(json.dumps(result.to_dict()))
    assert value["tokens"] == list(result.tokens)
    assert value["tokens_per_second"] == pytest.approx(3 / result.decode_seconds)
    assert value["step"]["mode"] == "eager"
    rendered = result.render()
    assert "tokens/s" in rendered
    assert "quantised linears" not in rendered
    assert "quantised linears: dense: torch's product" in plain(result.explain())


def test_chat_template(loaded: LoadedModel) -> None:
    with pytest.raises(UnsupportedError, match="no chat template"):
        generate(loaded, "hi", chat=True)
    loaded.tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    result = generate(loaded, "hi", chat=True, max_new_tokens=2)
    assert result.prompt_tokens == 4


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([320], {}, "token ids must lie in 0..319"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"chat": True}, "as text"),
        ("caf\udce9", {}, r"prompt: \\udce9 is half of a surrogate pair, which is no text; pass UTF-8"),
    ],
)
def test_wrong_requests_are_named(
    loaded: LoadedModel, prompt: list[int] | str, options: dict[str, float], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        generate(loaded, prompt, **options)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    save_plain(tmp_path, tiny_model("llama"))
    with pytest.raises(CheckpointError, match="no tokenizer"):
        generate(load(tmp_path, device="cpu"), "hi")


def test_nan_logits_are_named(loaded: LoadedModel) -> None:
    loaded.model.lm_head.weight.data[3, 3] = float("nan")
    with pytest.raises(NumericsError, match="NaN"):
        generate(loaded, PROMPT)


def alone(model: PreTrainedModel, prompt: list[int], count: int) -> torch.Tensor:
    """Logits [count, vocabulary] behind ``prompt`` and after each greedy token, with a growing cache."""
    forward = TransformersForward(model, batch=1, capacity=64, reason="", fixed=False)
    logits = [forward.prefill(torch.tensor([prompt]), torch.tensor([len(prompt)], dtype=torch.int32))]
    while len(logits) < count:
        logits.append(forward.step(logits[-1].argmax(-1)))
    return torch.cat(logits)


@pytest.mark.parametrize(
    "name", ["llama", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox", "falcon", "phi3", "bloom", "opt"]
)
def test_rows_of_different_length_see_their_own_tokens_only(name: str) -> None:
    """Left padding in a cache of fixed full-length layers, which serve sliding windows too, gives the logits
    that each prompt has alone with the model's own growing cache."""
    model = tiny_model(name)
    prompts = [PROMPT * 5, [7], [40, 41, 42, 43, 44, 45, 46]]
    expected = torch.stack([alone(model, prompt, 11) for prompt in prompts], dim=1)
    assert fixed_cache_refusal(model) == ""
    forward = TransformersForward(model, batch=3, capacity=64, reason="")
    ids = torch.zeros((3, 20), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
    for _ in range(2):
        # The second time starts over in a cache that holds other tokens.
        found = [forward.prefill(ids, lengths)]
        assert torch.equal(forward.lengths, lengths)
        while len(found) < 11:
            found.append(forward.step(found[-1].argmax(-1)))
        assert torch.equal(forward.lengths, lengths + 10)
        # The same float32 sums in another order, over two to six layers.
        assert float((torch.stack(found) - expected).norm() / expected.norm()) < 1e-5
