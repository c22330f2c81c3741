"""Heads whose size differs between layers are counted layer by layer."""

from __future__ import annotations

from types import SimpleNamespace

from transformers import CONFIG_MAPPING

from marlinq.models.head_sizes import key_channels


def test_layers_of_two_head_sizes() -> None:
    config = CONFIG_MAPPING["gemma4_text"](
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=64,
        num_kv_shared_layers=0,
    )
    each = config.per_layer_config
    assert [layer.head_dim for layer in each] == [16, 64]
    assert key_channels(config, 2) == sum(layer.num_key_value_heads * layer.head_dim for layer in each)


def test_a_config_without_head_sizes_counts_nothing() -> None:
    assert key_channels(SimpleNamespace(num_attention_heads=4, hidden_size=64), 3) == 3 * 64
    assert key_channels(CONFIG_MAPPING["llama"](num_hidden_layers=2, num_key_value_heads=8), 2) == 2 * 1024
    assert key_channels(SimpleNamespace(), 2) == 0
