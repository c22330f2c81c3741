"""Names and shapes of the tensors of the most common dense models, known without building them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OUTPUT_HEAD = "lm_head.weight"
_BIASED = {"llama": "attention_bias", "qwen3": "attention_bias", "mistral": None, "qwen2": None}
"""Model type -> the setting that gives all attention linears a bias."""


def usual_tensors(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of every tensor of an unquantised model; None for a model that only building it tells.

    The output head is among them even if it is tied.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _BIASED or not _is_causal(config):
        return None
    heads, kv_heads = _count(config, "num_attention_heads"), _count(config, "num_key_value_heads")
    hidden, inner = _count(config, "hidden_size"), _count(config, "intermediate_size")
    blocks, words = _count(config, "num_hidden_layers"), _count(config, "vocab_size")
    width = _count(config, "head_dim")
    if width is None and hidden and heads and kind != "qwen3":
        width = hidden // heads
    if not (heads and kv_heads and hidden and inner and blocks and words and width):
        return None
    linears = {
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (kv_heads * width, hidden),
        "self_attn.v_proj": (kv_heads * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    biased = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"} if kind == "qwen2" else set()
    if config.get(_BIASED[kind] or "") is True:
        biased = {name for name in linears if "attn" in name}
    if kind == "llama" and config.get("mlp_bias") is True:
        biased |= {name for name in linears if "mlp" in name}
    vectors: dict[str, int] = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    vectors |= {f"{name}.bias": linears[name][0] for name in biased}
    if kind == "qwen3":
        vectors |= {"self_attn.q_norm.weight": width, "self_attn.k_norm.weight": width}
    block: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    block |= {name: (size,) for name, size in vectors.items()}
    return {
        "model.embed_tokens.weight": (words, hidden),
        "model.norm.weight": (hidden,),
        OUTPUT_HEAD: (words, hidden),
        **{f"model.layers.{i}.{name}": shape for i in range(blocks) for name, shape in block.items()},
    }


def _is_causal(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and len(named) == 1 and str(named[0]).endswith("ForCausalLM")


def _count(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
