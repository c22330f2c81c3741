"""The decoder: the same tokens however steps are queued, kept between calls, usable after interrupts."""

from __future__ import annotations

import gc
import resource
from pathlib import Path
from threading import Thread

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from marlinq.core.errors import UnsupportedError
from marlinq.runtime import (
    GREEDY,
    Decoder,
    Generation,
    Generations,
    Interrupted,
    LoadedModel,
    Sampling,
    generate,
    generate_batch,
    load,
)
from marlinq.runtime.decoding import Decoders, capacity_class
from marlinq.runtime.sampling import RING
from marlinq.runtime.step.forward import Forward
from marlinq.runtime.step.transformers_forward import TransformersForward
from tests.testing.runnable_folders import save_plain, save_tokenizer
from tests.testing.tiny_models import tiny_model

PROMPTS = [[1, 9, 30, 77], [5], [40, 41, 42, 43, 44, 45]]


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedModel:
    save_plain(tmp_path, tiny_model("llama"))
    save_tokenizer(tmp_path)
    model = load(tmp_path, device="cpu")
    model.model.generation_config.eos_token_id = None
    model.model.config.eos_token_id = None
    return model


def forward(loaded: LoadedModel, batch: int = 1, capacity: int = 256) -> Forward:
    return TransformersForward(loaded.model, batch=batch, capacity=capacity, reason="a test")


def test_tokens_do_not_depend_on_how_steps_are_queued(loaded: LoadedModel) -> None:
    decoder = Decoder(forward(loaded, 3))
    decoder.begin(PROMPTS)
    one_by_one = decoder.read()
    for _ in range(100):
        decoder.advance()
        one_by_one += decoder.read()
    decoder.begin(PROMPTS)
    together: list[list[int]] = []
    for steps in (7, 30, 13, RING - 14, 0):
        # Two visits are under way: the ring comes round while the older one has not been read.
        if steps:
            decoder.advance(steps)
        together += decoder.read()
    assert decoder.pending == 0
    assert together == one_by_one[: len(together)]
    assert len(together) == 1 + 7 + 30 + 13 + RING - 14


def test_batches_of_different_prompts_are_those_prompts_alone(loaded: LoadedModel) -> None:
    together = generate_batch(loaded, PROMPTS, max_new_tokens=20)
    alone = [generate(loaded, prompt, max_new_tokens=20) for prompt in PROMPTS]
    assert [row.tokens for row in together.rows] == [row.tokens for row in alone]
    assert [row.text for row in together.rows] == [row.text for row in alone]
    assert together.tokens_per_second == pytest.approx(sum(row.tokens_per_second for row in together.rows))
    assert len(together.to_dict()["generations"]) == 3
    rendered = together.render()
    assert "\n[2] " in rendered
    assert "prompt 3" in rendered


def test_rows_end_on_their_own(loaded: LoadedModel) -> None:
    free = generate_batch(loaded, PROMPTS, max_new_tokens=20)
    end = free.rows[0].tokens[4]
    loaded.model.generation_config.eos_token_id = end
    ended = generate_batch(loaded, PROMPTS, max_new_tokens=20)
    for before, after in zip(free.rows, ended.rows, strict=True):
        length = before.tokens.index(end) + 1 if end in before.tokens else 20
        assert after.tokens == before.tokens[:length]
        assert after.stopped == ("eos" if end in before.tokens else "length")


def test_a_row_draws_the_same_in_every_batch(loaded: LoadedModel) -> None:
    sampling = Sampling(temperature=2.0, top_p=0.95, repetition_penalty=1.2, seed=4)
    first = generate(loaded, PROMPTS[0], max_new_tokens=20, sampling=sampling)
    together = generate_batch(loaded, PROMPTS, max_new_tokens=20, sampling=sampling)
    # float32 logits of other batches differ in their last bits only, which these draws don't meet.
    assert together.rows[0].tokens == first.tokens
    assert len({row.tokens for row in together.rows}) == 3


def test_the_longest_prompt_ends_a_batch_where_positions_end(tmp_path: Path) -> None:
    save_plain(tmp_path, tiny_model("gpt2"))
    loaded = load(tmp_path, device="cpu")
    loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = None
    limit = loaded.model.config.max_position_embeddings
    prompts = [[3] * (limit - 5), [7, 8]]
    rows = generate_batch(loaded, prompts, max_new_tokens=50).rows
    assert [(len(row.tokens), row.stopped) for row in rows] == [(5, "context")] * 2


def test_decoders_are_kept_and_grow_in_classes(loaded: LoadedModel) -> None:
    made: list[tuple[int, int]] = []

    def make(batch: int, capacity: int) -> Forward:
        made.append((batch, capacity))
        return forward(loaded, batch, capacity)

    decoders = Decoders()
    first = decoders.take(make, batch=1, tokens=20)
    assert decoders.take(make, batch=1, tokens=256) is first
    assert made == [(1, 256)]
    drawing = decoders.take(make, batch=1, tokens=20, shape=Sampling(temperature=1.0).shape)
    assert drawing is not first
    grown = decoders.take(make, batch=1, tokens=300)
    assert made[-1] == (1, 320)
    # The smaller one is gone: what it served is served by the larger one.
    assert decoders.take(make, batch=1, tokens=20) is grown
    for batch in range(2, 7):
        decoders.take(make, batch=batch, tokens=20)
    count = len(made)
    # Four are kept, the last used ones.
    decoders.take(make, batch=3, tokens=20)
    assert len(made) == count
    decoders.take(make, batch=1, tokens=20)
    assert len(made) == count + 1


def test_a_decoder_beyond_a_limit_does_not_serve_what_stays_within(loaded: LoadedModel) -> None:
    decoders = Decoders()

    def take(tokens: int) -> int:
        decoder = decoders.take(
            lambda batch, capacity: forward(loaded, batch, capacity), batch=1, tokens=tokens, limit=300
        )
        return decoder.forward.capacity

    assert [take(301), take(290), take(20), take(310)] == [320, 300, 300, 320]


def test_memory_of_kept_decoders_is_given_back_when_it_runs_out(loaded: LoadedModel) -> None:
    decoders = Decoders()
    first = decoders.take(lambda batch, capacity: forward(loaded, batch, capacity), batch=1, tokens=20)
    asked: list[int] = []

    def scarce(batch: int, capacity: int) -> Forward:
        asked.append(batch)
        if decoders._kept:
            raise torch.cuda.OutOfMemoryError("none left")
        return forward(loaded, batch, capacity)

    second = decoders.take(scarce, batch=2, tokens=20)
    assert asked == [2, 2]
    assert list(decoders._kept.values()) == [second] != [first]
    decoders.clear()

    def never(batch: int, capacity: int) -> Forward:
        raise torch.cuda.OutOfMemoryError("none at all")

    with pytest.raises(torch.cuda.OutOfMemoryError, match="at all"):
        decoders.take(never, batch=1, tokens=20)


@pytest.mark.parametrize(
    ("tokens", "capacity"),
    [(1, 256), (256, 256), (257, 320), (321, 384), (512, 512), (513, 640), (1025, 1280), (8192, 8192)],
)
def test_capacity_classes(tokens: int, capacity: int) -> None:
    assert capacity_class(tokens) == capacity


def test_a_second_generation_reuses_the_decoder(loaded: LoadedModel) -> None:
    first = generate(loaded, PROMPTS[0], max_new_tokens=8)
    decoder = next(iter(loaded.decoders._kept.values()))
    second = generate(loaded, PROMPTS[0], max_new_tokens=8)
    assert second.tokens == first.tokens
    assert list(loaded.decoders._kept.values()) == [decoder]


def test_generations_within_and_beside_each_other_do_not_mix(loaded: LoadedModel) -> None:
    alone = [generate(loaded, prompt, max_new_tokens=12).tokens for prompt in PROMPTS[:2]]
    found: dict[int, tuple[int, ...]] = {}

    def run(index: int) -> None:
        found[index] = generate(loaded, PROMPTS[index], max_new_tokens=12).tokens

    def interject(piece: str) -> None:
        if not found:
            run(1)
            other.start()
            other.join()

    other = Thread(target=run, args=(0,))
    outer = generate(loaded, PROMPTS[0], max_new_tokens=12, on_text=interject)
    assert (outer.tokens, found) == (alone[0], {0: alone[0], 1: alone[1]})
    # One of equal decoders is kept, and all are free again.
    assert not any(decoder.in_use for decoder in loaded.decoders._kept.values())


@pytest.mark.parametrize("place", [1, 2])
def test_an_interrupt_leaves_the_model_usable(loaded: LoadedModel, place: int) -> None:
    whole = generate(loaded, PROMPTS[0], max_new_tokens=12)
    pieces: list[str] = []

    def interrupt(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == place:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as raised:
        generate(loaded, PROMPTS[0], max_new_tokens=12, on_text=interrupt)
    came = raised.value.partial
    assert isinstance(came, Generation)
    assert came.stopped == "interrupt"
    assert 0 < len(came.tokens) < 12
    assert came.tokens == whole.tokens[: len(came.tokens)]
    assert came.text.startswith("".join(pieces))
    assert isinstance(raised.value, KeyboardInterrupt)
    assert generate(loaded, PROMPTS[0], max_new_tokens=12).tokens == whole.tokens


def test_an_interrupted_forward_leaves_the_model_usable(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generate_batch(loaded, PROMPTS, max_new_tokens=12)
    decoder = next(iter(loaded.decoders._kept.values()))
    right, calls = decoder.forward.step, [0]

    def interrupted(tokens: torch.Tensor) -> torch.Tensor:
        logits = right(tokens)
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return logits

    with monkeypatch.context() as patched:
        patched.setattr(decoder.forward, "step", interrupted)
        with pytest.raises(Interrupted) as raised:
            generate_batch(loaded, PROMPTS, max_new_tokens=12)
    came = raised.value.partial
    assert isinstance(came, Generations)
    for before, after in zip(whole.rows, came.rows, strict=True):
        assert after.tokens == before.tokens[:4]
    again = generate_batch(loaded, PROMPTS, max_new_tokens=12)
    assert [row.tokens for row in again.rows] == [row.tokens for row in whole.rows]


def tensors() -> list[torch.Tensor]:
    """All that are alive."""
    gc.collect()
    # By type: to ask some deprecated objects for their class is a warning.
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_tokens_need_constant_memory(tmp_path: Path, count: int) -> None:
    """Tensors' memory exactly; the process's peak, but for the lists of tokens and their text."""
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1
    )
    config.max_position_embeddings = 16384
    save_plain(tmp_path, AutoModelForCausalLM.from_config(config))
    save_tokenizer(tmp_path)
    loaded = load(tmp_path, device="cpu")
    loaded.model.generation_config.eos_token_id = loaded.model.config.eos_token_id = None
    loaded.tokenizer.eos_token = None
    sizes: list[int] = []
    peaks: list[int] = []
    pieces = [0]

    def measure(_: str) -> None:
        pieces[0] += 1
        if pieces[0] in (20, 200, count * 2 // 5):
            sizes.append(sum(each.nbytes for each in tensors()))
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    # Tensors of earlier tests are held, since their end would hide growth.
    earlier = tensors()
    sampling = Sampling(temperature=3.0, repetition_penalty=1.1)
    result = generate(loaded, [65, 66], max_new_tokens=count, sampling=sampling, on_text=measure)
    assert len(result.tokens) == count
    assert len(sizes) == 3
    assert sizes[0] == sizes[1] == sizes[2]
    assert earlier
    # Kibibytes; a cache that grows by a copy for each token would take megabytes for this model too.
    assert peaks[2] - peaks[0] < 4096


def test_models_that_read_padding_take_one_length_at_a_time(loaded: LoadedModel) -> None:
    growing = TransformersForward(loaded.model, batch=2, capacity=64, reason="why", fixed=False)
    decoder = Decoder(growing)
    with pytest.raises(UnsupportedError, match=r"prompts of 1 to 4 tokens together.*\(why\)"):
        decoder.begin(PROMPTS[:2])
    decoder.begin([PROMPTS[0], PROMPTS[0]], GREEDY)
    decoder.advance(3)
    first, later = decoder.read(), decoder.read()
    alone = generate(loaded, PROMPTS[0], max_new_tokens=4).tokens
    assert [row[0] for row in first + later] == [row[1] for row in first + later] == list(alone)
