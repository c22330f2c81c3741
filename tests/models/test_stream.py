from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from marlinq.models import (
    BlockReplay,
    ModelInstance,
    Projection,
    StreamFinder,
    build_blueprint,
    streams_at,
)
from tests.testing.tiny_models import in_memory, tiny_model

LLAMA = {"self_attn.o_proj": "post_attention_layernorm", "mlp.down_proj": ""}
FOUND = {
    "llama": LLAMA,
    "qwen3": LLAMA,
    "gemma": LLAMA,
    "phi3": LLAMA,
    "starcoder2": {"self_attn.o_proj": "post_attention_layernorm", "mlp.c_proj": ""},
    "gpt2": {"attn.c_proj": "ln_2", "mlp.c_proj": ""},
    "bloom": {"self_attention.dense": "post_attention_layernorm", "mlp.dense_4h_to_h": ""},
    "opt": {"self_attn.out_proj": "final_layer_norm", "fc2": ""},
    # Norms of outputs, or attention and MLP beside each other.
    "gemma2": {},
    "olmo2": {},
    "cohere": {},
    "gpt_neox": {},
}


def finder(name: str, dtype: torch.dtype) -> tuple[dict[str, str], dict[str, Tensor], Tensor]:
    """(places of the stream in the first block, without its name; the stream there; the block's output)."""
    model = tiny_model(name)
    blueprint = build_blueprint(model.config.to_dict(), source=name)
    instance = ModelInstance(blueprint, in_memory(model), device=torch.device("cpu"), dtype=dtype)
    block = blueprint.blocks[0].name
    replay = BlockReplay(instance)
    (hidden,) = replay.record([torch.arange(3, 43).reshape(2, 20)])
    found = StreamFinder(instance.model, block, blueprint.blocks[0].projections)
    with instance.loaded(block), found.watching(hidden):
        output = replay.run(0, 0, hidden)
    places, streams = found.found(output)
    shorter = {key.removeprefix(f"{block}."): value for key, value in places.items()}
    assert set(streams) == set(places.values())
    return {key: value.removeprefix(block).strip(".") for key, value in shorter.items()}, streams, output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(FOUND))
def test_writers_are_found_in_every_architecture(name: str, dtype: torch.dtype) -> None:
    places, streams, output = finder(name, dtype)
    assert places == FOUND[name]
    if places:
        assert any(stream is output for stream in streams.values())


class Block(nn.Module):
    """Adds ``factor`` times a layer's output to its input, then calls a norm on the sum, ``calls`` times."""

    def __init__(self, factor: float, calls: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)
        self.factor, self.calls = factor, calls

    def forward(self, hidden: Tensor) -> Tensor:
        after = hidden + self.factor * self.layer(hidden)
        for _ in range(self.calls):
            made = self.norm(after)
        return torch.tanh(made)


@pytest.mark.parametrize(
    ("factor", "calls", "zero", "found"),
    [
        (1.0, 1, False, {"block.layer": "block.norm"}),
        (1.0, 2, False, {}),  # which of the calls is meant?
        (0.5, 1, False, {}),
        (1.0, 1, True, {}),  # nothing says that anything was added
        (1.001, 1, False, {}),
    ],
)
def test_scaled_or_normed_sums_are_not_stream_writes(
    factor: float, calls: int, zero: bool, found: dict[str, str]
) -> None:
    torch.manual_seed(4)
    model = nn.ModuleDict({"block": Block(factor, calls)})
    if zero:
        nn.init.zeros_(model["block"].layer.weight)
    watch = StreamFinder(model, "block", [Projection("block.layer", "block.layer.weight", 8, 8)])
    hidden = torch.randn(1, 5, 8)
    with torch.no_grad(), watch.watching(hidden):
        output = model["block"](hidden)
    assert watch.found(output)[0] == found


def test_streams_are_inputs_of_modules() -> None:
    model = nn.ModuleDict({"block": Block(1.0, 1)})
    hidden = torch.randn(1, 5, 8)
    seen: dict[str, Tensor] = {}
    with torch.no_grad():
        with streams_at(model, ["block.norm"], seen.__setitem__):
            model["block"](hidden)
        expected = hidden + model["block"].layer(hidden)
        model["block"](hidden * 2)
    assert seen.keys() == {"block.norm"}
    assert torch.equal(seen["block.norm"], expected)
