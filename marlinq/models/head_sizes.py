"""Sizes of attention heads, which may differ between layers."""

from __future__ import annotations

from typing import Any


def key_channels(config: Any, layers: int) -> int:
    """Channels of one token's keys, summed over all layers.

    Gemma 4 has heads of two sizes, for which transformers has a config per layer (``per_layer_config``). A
    layer without heads counts its hidden size, and one whose config has neither counts 0.

    Args:
        config: transformers' config of a language model (``get_text_config()``).
        layers: number of decoder blocks that have keys.
    """
    # The config of a checkpoint's own model code may lack these attributes.
    layered = isinstance(getattr(config, "num_hidden_layers", None), int)
    each = getattr(config, "per_layer_config", ()) if layered else ()
    count = min(layers, len(each))
    channels = [_key_channels(each[index]) for index in range(count)]
    if len(channels) < layers:
        channels += [channels[-1] if channels else _key_channels(config)] * (layers - len(channels))
    return sum(channels)


def _key_channels(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None) or (getattr(config, "hidden_size", None) or 0) // heads
    return int((getattr(config, "num_key_value_heads", None) or heads) * size)
