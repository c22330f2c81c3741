"""Values that blocks hand on beside the hidden states reach their reader, in each pass its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from marlinq.core.errors import UnsupportedError
from marlinq.models import BlockReplay, ModelInstance, build_blueprint
from marlinq.models.handed_on import Markers, Returned, Shared
from tests.testing.tiny_models import in_memory

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    **SIZES,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    # The last two layers read keys and values of the first two.
    "gemma4_text": {
        **SIZES,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    # The second layer attends to what the first one's indexer chose.
    "glm_moe_dsa": {
        **LATENT,
        "num_hidden_layers": 2,
        "indexer_types": ["full", "shared"],
        "first_k_dense_replace": 2,
    },
}


def tiny(name: str) -> tuple[PreTrainedModel, ModelInstance]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**CONFIGS[name]), dtype=torch.float32)
    model.eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    blueprint = build_blueprint(model.config.to_dict(), source=name)
    device = torch.device("cpu")
    return model, ModelInstance(blueprint, in_memory(model), device=device, dtype=torch.float32)


def outputs(model: PreTrainedModel, names: list[str], ids: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []

    def keep(module: object, args: object, output: Any) -> None:
        seen.append(output if isinstance(output, Tensor) else output[0])

    handles = [model.get_submodule(name).register_forward_hook(keep) for name in names]
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", CONFIGS)
def test_each_pass_reads_its_own(name: str) -> None:
    model, instance = tiny(name)
    blocks = instance.blueprint.blocks
    ids = [torch.arange(start, start + length)[None] % 64 for start, length in ((3, 20), (17, 13))]
    replay = BlockReplay(instance)
    hidden = list(replay.record(ids))
    other_replay = replay.beside()
    # Another pass over the text, of which every block sees the states in falling order.
    others = [states.flip(1) for states in hidden]
    expected = [outputs(model, [block.name for block in blocks], each) for each in ids]
    for index, block in enumerate(blocks):
        with instance.loaded(block.name):
            for number, states in enumerate(hidden):
                twice = [replay.run(index, number, states) for _ in range(2)]
                others[number] = other_replay.run(index, number, others[number])
                assert torch.equal(*twice)
                hidden[number] = twice[0]
                # Float32 sums in another order.
                torch.testing.assert_close(twice[0], expected[number][index], rtol=1e-4, atol=1e-5)


def test_gradients_do_not_stop_at_shared_keys_in_silence() -> None:
    _, instance = tiny("gemma4_text")
    replay = BlockReplay(instance)
    (hidden,) = replay.record([torch.arange(3, 20)[None]])
    for index, block in enumerate(instance.blueprint.blocks):
        with instance.loaded(block.name):
            if index == 2:
                with (
                    torch.enable_grad(),
                    pytest.raises(UnsupportedError, match=r"layers\.2: reads values of"),
                ):
                    replay.call(index, 0, hidden.requires_grad_(), {})
                break
            hidden = replay.run(index, 0, hidden)


def test_a_value_of_an_earlier_block_is_refused() -> None:
    markers = Markers()
    (first,) = markers.returns(1)
    assert markers.of("layers.1", first) == Returned(0)
    markers.returns(1)
    with pytest.raises(UnsupportedError, match=r"layers\.2: expected no value of another block"):
        markers.of("layers.2", first)


def test_mappings_are_told_from_ordinary_arguments() -> None:
    markers, written = Markers(), dict[str, int]()
    assert markers.of("layers.0", {"kept": 1}) is None
    assert markers.of("layers.0", written) == Shared(0, dict)
    written["by a block"] = 1
    assert markers.of("layers.1", written) == Shared(0, dict)
