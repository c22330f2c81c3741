from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lab.models.families import Family, random_model
from marlinq.core.errors import UnsupportedError
from marlinq.models import BlockReplay, ModelInstance, build_blueprint, shared_inputs
from tests.testing.tiny_models import CONFIGS, in_memory, tiny_model

LENGTHS = ([20, 13], [9])


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for lengths in LENGTHS:
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, length in enumerate(lengths):
            ids[row, :length] = torch.randint(3, 128, (length,), generator=generator)
        made.append(ids)
    return made


def block_outputs(model: torch.nn.Module, names: list[str], ids: Tensor, **images: Tensor) -> list[Tensor]:
    seen: dict[str, Tensor] = {}

    def keep(name: str):
        def hook(module, args, output):
            seen[name] = output if isinstance(output, Tensor) else output[0]

        return hook

    handles = [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False, **images)
    for handle in handles:
        handle.remove()
    return [seen[name] for name in names]


def test_batches_are_alike_where_blocks_are_called_alike() -> None:
    model = tiny_model("llama")
    blueprint = build_blueprint(model.config.to_dict(), source="llama")
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    replay = BlockReplay(instance)
    first, longer = batches()
    list(replay.record([first, longer, first.flip(0)]))
    assert replay.alike(0, 0)
    assert replay.alike(0, 2)
    assert not replay.alike(0, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_blocks_equal_the_whole_model_on_each_document_alone(name: str) -> None:
    model = tiny_model(name)
    blueprint = build_blueprint(model.config.to_dict(), source=name)
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    replay = BlockReplay(instance)
    ids = batches()
    hidden = list(replay.record(ids))
    per_block: list[list[Tensor]] = []
    for index in range(len(blueprint.blocks)):
        with instance.loaded(blueprint.blocks[index].name):
            hidden = [replay.run(index, number, states) for number, states in enumerate(hidden)]
        per_block.append(hidden)
    assert all(parameter.is_meta for parameter in instance.model.parameters())

    names = [block.name for block in blueprint.blocks]
    for number, lengths in enumerate(LENGTHS):
        for row, length in enumerate(lengths):
            # Without padding and without a mask: pads on the right must not have reached any real token.
            expected = block_outputs(model, names, ids[number][row : row + 1, :length])
            for index, want in enumerate(expected):
                found = per_block[index][number][row, :length]
                scale = want.abs().max()
                # Different batch shapes change the order of float32 sums: a few hundred roundings.
                assert (found - want[0]).abs().max() <= 2e-5 * scale, (name, index)


def test_streams_in_front_of_the_batch_are_replayed() -> None:
    """Blocks of Gemma 3n take [streams, B, T, hidden]."""
    model = random_model(Family("gemma3n_text", "Gemma3nForCausalLM", wrapper=False))
    blueprint = build_blueprint(model.config.to_dict(), source="gemma3n")
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    replay = BlockReplay(instance)
    ids = batches()[0]
    hidden = next(iter(replay.record([ids])))
    assert hidden.shape == (*ids.shape, model.config.altup_num_inputs, model.config.hidden_size)
    names = [block.name for block in blueprint.blocks]
    for index, expected in enumerate(block_outputs(model, names, ids)):
        with instance.loaded(names[index]):
            hidden = replay.run(index, 0, hidden)
        assert (hidden - expected.movedim(0, 2)).abs().max() <= 2e-5 * expected.abs().max(), index


def test_blocks_behind_images_are_replayed() -> None:
    """The projected image takes the place of its tokens; a batch of text beside it runs as alone."""
    model = random_model(Family("llava", "LlavaForConditionalGeneration", wrapper=True))
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    blueprint = build_blueprint(config, source="llava")
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    vision = model.config.vision_config
    places = (vision.image_size // vision.patch_size) ** 2
    ids = torch.tensor([[5, *[model.config.image_token_id] * places, 6, 7, 8]])
    text = torch.tensor([[5, 6, 7, 8]])
    pixels = torch.randn(1, 3, vision.image_size, vision.image_size)
    replay = BlockReplay(instance)
    names = [block.name for block in blueprint.blocks]
    hidden = list(replay.record([ids, text], [{"pixel_values": pixels, "unknown": ids}, None]))
    whole = [
        block_outputs(model, names, ids, pixel_values=pixels),
        block_outputs(model, names, text),
    ]
    for index, name in enumerate(names):
        with instance.loaded(name):
            hidden = [replay.run(index, number, states) for number, states in enumerate(hidden)]
        for found, expected in zip(hidden, whole, strict=True):
            assert (found - expected[index]).abs().max() <= 2e-5 * expected[index].abs().max(), name
    assert all(parameter.is_meta for parameter in instance.model.parameters())


@pytest.mark.parametrize("shift", [lambda x: x + 3, lambda x: 2 * x])
def test_additions_between_blocks_are_replayed_in_each(shift: Callable[[Tensor], Tensor]) -> None:
    """As Qwen3-VL adds features of an image; anything else than adding is refused."""
    model = tiny_model("llama")
    blueprint = build_blueprint(model.config.to_dict(), source="llama")
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    names = [block.name for block in blueprint.blocks]

    def changed(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (shift(args[0]), *args[1:])

    handle = instance.model.get_submodule(names[1]).register_forward_pre_hook(changed)
    replay, ids = BlockReplay(instance), batches()[1]
    try:
        if shift(torch.zeros(1)) == 0:
            with pytest.raises(UnsupportedError, match="by more than adding to them"):
                list(replay.record([ids], [{}]))
            return
        (hidden,) = replay.record([ids], [{}])
    finally:
        handle.remove()
    model.get_submodule(names[1]).register_forward_pre_hook(changed)
    for index, expected in enumerate(block_outputs(model, names, ids)):
        with instance.loaded(names[index]):
            hidden = replay.run(index, 0, hidden)
        assert (hidden - expected).abs().max() <= 2e-5 * expected.abs().max(), index


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", [{"q_proj", "k_proj", "v_proj"}, {"o_proj"}, {"gate_proj", "up_proj"}, {"down_proj"}]),
        ("falcon", [{"query_key_value", "dense_h_to_4h"}, {"dense"}, {"dense_4h_to_h"}]),
        ("phi", [{"q_proj", "k_proj", "v_proj", "fc1"}, {"dense"}, {"fc2"}]),
        ("phi3", [{"qkv_proj"}, {"o_proj"}, {"gate_up_proj"}, {"down_proj"}]),
        ("gpt2", [{"c_attn"}, {"c_proj"}, {"c_fc"}, {"c_proj"}]),
        ("gpt_neox", [{"query_key_value"}, {"dense"}, {"dense_h_to_4h"}, {"dense_4h_to_h"}]),
        ("opt", [{"q_proj", "k_proj", "v_proj"}, {"out_proj"}, {"fc1"}, {"fc2"}]),
    ],
)
def test_linears_that_read_one_tensor_are_found_at_run_time(name: str, expected: list[set[str]]) -> None:
    model = tiny_model(name)
    blueprint = build_blueprint(model.config.to_dict(), source=name)
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    replay = BlockReplay(instance)
    hidden = next(iter(replay.record(batches()[:1])))
    with instance.loaded(blueprint.blocks[0].name):
        projections = blueprint.blocks[0].projections
        names = [projection.name for projection in projections]
        groups = shared_inputs(instance.model, projections, lambda: replay.run(0, 0, hidden))
    found = [{member.rpartition(".")[2] for member in group} for group in groups]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))
    assert sorted(member for group in groups for member in group) == sorted(names)


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([1, 2], "blocks before it did not run"),
        ([0, 0], "it had already run"),
        ([0, 1], "the model ran 2 of its 3 blocks"),
    ],
)
def test_blocks_that_text_does_not_run_through_once_are_named(order: list[int], says: str) -> None:
    """As those of Llama 3.2 Vision that read images."""
    model = tiny_model("llama")
    blueprint = build_blueprint(model.config.to_dict(), source="llama")
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    inner = instance.model.model

    def forward(input_ids: Tensor, **kwargs: object) -> None:
        hidden = torch.zeros(*input_ids.shape, 64)
        rotation = inner.rotary_emb(hidden, torch.arange(input_ids.shape[1])[None])
        for index in order:
            hidden = inner.layers[index](hidden, position_embeddings=rotation)

    inner.forward = forward
    with pytest.raises(UnsupportedError, match=f"model.layers.*: {says}.*--method rtn needs no text"):
        list(BlockReplay(instance).record(batches()))


def test_a_model_that_changes_states_between_blocks_is_refused() -> None:
    model = tiny_model("llama")
    blueprint = build_blueprint(model.config.to_dict(), source="llama")
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)

    # Stands for an outer forward that adds something to the hidden states after the first block.
    second = instance.model.get_submodule(blueprint.blocks[1].name)
    handle = second.register_forward_pre_hook(lambda module, args: (args[0] + 1, *args[1:]))
    with pytest.raises(UnsupportedError, match=r"model\.layers\.1.*previous block"):
        list(BlockReplay(instance).record(batches()))
    handle.remove()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_head_is_given_what_the_whole_model_gives_it(name: str) -> None:
    model = tiny_model(name)
    blueprint = build_blueprint(model.config.to_dict(), source=name)
    assert blueprint.head is not None
    head = blueprint.by_name[blueprint.head]
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    replay = BlockReplay(instance)
    ids = batches()
    hidden = list(replay.record(ids))
    for index in range(len(blueprint.blocks)):
        with instance.loaded(blueprint.blocks[index].name):
            hidden = [replay.run(index, number, states) for number, states in enumerate(hidden)]
    found: list[Tensor] = []
    replay.after_blocks(zip(ids, hidden, strict=True), head, lambda name, x: found.append(x))
    assert all(parameter.is_meta for parameter in instance.model.parameters())

    seen: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for each in ids:
            model(input_ids=each, use_cache=False)
    for mine, theirs in zip(found, seen, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_head_that_does_not_see_every_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    blueprint = build_blueprint(model.config.to_dict(), source="llama")
    assert blueprint.head is not None
    head = blueprint.by_name[blueprint.head]
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=torch.float32)
    replay = BlockReplay(instance)
    ids = batches()
    hidden = list(replay.record(ids))
    whole = type(instance.model).forward

    def only_the_last(self, **kwargs):
        return whole(self, **kwargs, logits_to_keep=1)

    monkeypatch.setattr(type(instance.model), "forward", only_the_last)
    with pytest.raises(
        UnsupportedError, match=r"lm_head: expected one input of \[2, 20\] tokens, found \[\["
    ):
        replay.after_blocks(zip(ids, hidden, strict=True), head, lambda name, x: None)
    monkeypatch.setattr(type(instance.model), "forward", lambda self, **kwargs: self.model(**kwargs))
    with pytest.raises(UnsupportedError, match="found none"):
        replay.after_blocks(zip(ids, hidden, strict=True), head, lambda name, x: None)
