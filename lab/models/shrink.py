"""Tiny configs of transformers' model families, shrunk by rules on the names of their keys.

A family's default config is that of its published models. Every width, count and table in it is replaced by
a small one that keeps the divisions between them: heads divide channels, key-value heads divide heads, and
each kind of layer that a list names is there at least once. What rules can't know stands in :data:`_SET`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

HIDDEN, VOCABULARY, POSITIONS, HEADS, HEAD_DIM = 64, 256, 128, 4, 16
TEXT_TOKENS = 96
"""Token ids below this mean text; those of images, sounds and the like come behind."""
_LAYERS = 2

# (regular expression of a key of a config, largest number that it keeps); the first that matches the whole
# key counts.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"num_nextn_predict_layers|num_mtp\w*|mtp_num\w*|num_kv_shared_layers", 0),
    (r"\w*vocab_size\w*|num_embeddings|num_embeds|vocab_offset|ngram_vocab_size_base", VOCABULARY),
    (r"codebook_size", 64),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq\w*|seq_length|\w*max_length|context_length",
        POSITIONS,
    ),
    (r"(max_\w+_positions|original_max_position_embeddings|relative_attention_max_distance)", POSITIONS),
    (r"linear_num_key_heads|\w*key_value_heads\w*|num_kv_heads|n_kv_heads|num_query_groups", HEADS // 2),
    (r"mamba_n_heads|mamba_num_heads", 2 * HEADS),
    (r"(?!resampler)\w*(num|n|attention)_heads?\w*|linear_num_\w+|attention_heads|index_n_heads", HEADS),
    (r"qk_head_dim|index_head_dim|attention_head_dim", 2 * HEAD_DIM),
    (
        r"\w*head_dim\w*|head_size|kv_channels|\w*d_head|\w*headdim|d_kv|dim_head|attention_head_size",
        HEAD_DIM,
    ),
    (r"\w*lora_rank|adapter_rank|\w*dt_rank|time_step_rank|gated_norm_rank|\w*_rank|hc_lowrank", 32),
    (r"index_topk|index_block_size", 64),
    (r"index_topk_blocks", 2),
    (r"\w*num_(local_|routed_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"\w*experts_per_tok(en)?|top_k_experts|moe_top_?k|moe_k|num_experts_per_token", 2),
    (r"n_group|topk_group|num_expert_group|(mamba_)?n_groups|o_groups", 1),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"\w*state_size|mamba_d_state", HEAD_DIM),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers", 1),
    (r"moe_layer_end_index", 1),
    (r"\w*(expert|moe)\w*(intermediate_size|ffn_hidden_size)|share_expert_dim", 32),
    (r"\w*intermediate_size\w*|\w*ffn_dim|n_inner|mlp_dim|\w*ffn_hidden_size|d_ff|dff|dim_ff|d_inner", 96),
    (r"hidden_size_per_layer_input|router_hidden_size", 32),
    (r"\w*(hidden_size|hidden_dim|embed_dim|embedding_size|d_model|n_embd)(_global)?|emb_dim|dim", HIDDEN),
    (
        r"(output|input|projection|projector|adapter|vision_output|proj|embedding|decoder)\w*_dim|lru_width",
        HIDDEN,
    ),
    (r"\w*sliding_window(_size)?|attention_window_size|\w*attention_chunk_size|local_attention", 32),
    (r"(?!acoustic|audio)\w*chunk_size", 16),
    (r"rotary_dim", 8),
    (r"\w*(every_n_layers|layer_period|layer_interval|cross_attention_frequency|layer_group_size)", 2),
    (r"\w*layer_offset", 1),
    (r"\w*layers|n_layer|num_layers_per_stack|num_blocks|\w*depth", _LAYERS),
)
_TOKEN = re.compile(
    r"(?!bos|eos|pad|sep|cls|unk|mask|decoder_start|forced)\w*_token_(id|index|id_\w+)|(boi|eoi|boa|eoa)_token\w*"
)
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_LEFT_OUT = {"model_type", "transformers_version", "id2label", "label2id", "dtype", "architectures"}

# By family: what the defaults leave out or rules can't know. A dotted key lies in an inner config.
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_SECTIONS = {**_ROPE, "mrope_section": [2, 3, 3]}
_ROPE_BY_LAYER = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
_WINDOWED = {"num_attention_heads": HEADS, "head_dim": 2 * HEAD_DIM, "qk_nope_head_dim": HEAD_DIM}
# In place of towers of timm, a package that brings torchvision; the language model is their own.
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 8,
    "model_args": {"embed_dim": HIDDEN},
}
_HALF_SECTIONS = {**_ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
_SET: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_vl": {"text_config.layer_types": ["conv", "full_attention"], "text_config.full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mistral4": {"head_dim": 2 * HEAD_DIM},
    "falcon_h1": {"mamba_d_head": HEAD_DIM},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "recurrent_gemma": {"num_hidden_layers": 3, "intermediate_size": 192},
    "step3p7": {"text_config.sliding_window": 32},
    "moshi": {"ffn_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4},
    "hunyuan_v1_dense": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": 4, "moe_topk": 2, "num_hidden_layers": 2},
    "ministral": {"head_dim": HEAD_DIM},
    "nemotron": {"num_key_value_heads": 2, "head_dim": HEAD_DIM},
    "qwen2_vl": {"text_config.rope_parameters": _SECTIONS},
    "qwen2_5_vl": {"text_config.rope_parameters": _SECTIONS},
    "qwen2_5_omni_thinker": {"text_config.rope_parameters": _SECTIONS},
    "paddleocr_vl": {"text_config.rope_parameters": _SECTIONS},
    "glm4v": {"text_config.rope_parameters": _HALF_SECTIONS},
    "glm46v": {"text_config.rope_parameters": _HALF_SECTIONS},
    "glmga": {"text_config.rope_parameters": _HALF_SECTIONS},
    "glm_ocr": {"text_config.rope_parameters": {**_SECTIONS}},
    "glm4v_moe": {"text_config.rope_parameters": _HALF_SECTIONS},
    "xmod": {"default_language": "en_XX"},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mlp"]},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_LAYER},
    "cohere_compass": {"text_config.rope_parameters": _ROPE_BY_LAYER},
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8, "kv_n_heads": HEADS // 2},
        "ffn_config": {"hidden_size": HIDDEN, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "qwen4_exp_text": _INDEXER,
    "qwen4_exp": {f"text_config.{key}": value for key, value in _INDEXER.items()},
    "reformer": {"axial_pos_embds_dim": [32, 32], "is_decoder": True},
    # Its shared block reads the residual stream and the embedding side by side.
    "zamba2": {
        "hybrid_layer_ids": [1],
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": HIDDEN // 2,
    },
    "zamba": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": HIDDEN // 2,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGA": 100}, "vq_config.base_channels": 32},
    "emu3": {
        "vocabulary_map": {"<image>": 4, "<|extra_200|>": 5, "<|visual token 000000|>": 100},
        "vq_config.base_channels": 32,
    },
    "deepseek_ocr2": {
        "text_config.num_experts_per_tok": 2,
        "text_config.mlp_layer_types": ["dense", "sparse"],
    },
    "ernie4_5_vl_moe": {"text_config.rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "exaone4_5": {"text_config.model_type": "exaone4"},
    "florence2": {
        "vision_config.embed_dim": [32, 32, 32, HIDDEN],
        "vision_config.num_heads": [2] * 4,
        "vision_config.num_groups": [2] * 4,
        "vision_config.depths": [1] * 4,
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4,
        "text_config.top_k_experts": 2,
        "text_config.moe_intermediate_size": 32,
    },
    "dots3_note_text": {"head_dim": 2 * HEAD_DIM, "per_layer_config": {2: _WINDOWED}},
    "dots3_note": {
        "text_config.head_dim": 2 * HEAD_DIM,
        "text_config.per_layer_config": {2: _WINDOWED},
        "audio_config.adapter_input_size": HIDDEN,
        "audio_config.adapter_out_dim": HIDDEN,
    },
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
    },
    "hunyuan_vl": {"text_config.head_dim": HEAD_DIM, "text_config.rope_parameters": _SECTIONS},
    "janus": {"vq_config.base_channels": 32},
    "muse_spark": {
        "audio_config.patch_sizes": [16, 6, 5, 4],
        "audio_config.hidden_sizes": [32, 32, 32, HIDDEN],
    },
    "fun_asr_nano": {"adaptor_config.intermediate_size": HIDDEN // 4},
    "kyutai_speech_to_text": {
        "ffn_dim": 128,
        "codec_config.upsample_groups": HIDDEN,
        "codec_config.num_filters": 4,
    },
    "qwen2_5_omni": {
        "thinker_config.text_config.rope_parameters": _SECTIONS,
        "talker_config.rope_parameters": _SECTIONS,
        "token2wav_config.bigvgan_config.upsample_initial_channel": 128,
    },
    "qwen3_omni_moe": {
        "talker_config.text_config.shared_expert_intermediate_size": 32,
        "talker_config.spatial_merge_size": 2,
    },
    "gemma3n": {"vision_config": _SIGLIP},
    "fast_vlm": {"vision_config": _SIGLIP},
    "perception_lm": {"vision_config": _SIGLIP},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config.num_filters": 2,
        "semantic_tokenizer_encoder_config.num_filters": 2,
    },
}


def shrunk(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The tiny config of a family.

    Args:
        family: its ``model_type``.
        config: a published model's config, from ``to_dict``.
    """
    result = _small(config, count(TEXT_TOKENS))
    for key, value in _SET.get(family, {}).items():
        *path, last = key.split(".")
        inner = result
        for part in path:
            inner[part] = inner.get(part) or {}
            inner = inner[part]
        inner[last] = value
    return result


def _small(config: Mapping[str, Any], tokens: Iterator[int], scale: float = 1.0) -> dict[str, Any]:
    layers = next((config[key] for key in _LAYER_COUNTS if isinstance(config.get(key), int)), 0)
    own = config.get("per_layer_config") or {}
    lists = {
        key: value
        for key, value in config.items()
        if isinstance(value, (list, tuple)) and layers and len(value) == layers
    }
    # Lists of layers' numbers don't say what kind a layer is.
    numbers = {key for key, value in lists.items() if layers > 1 and list(value) == list(range(layers))}
    telling = [value for key, value in lists.items() if key not in numbers]
    kinds = [
        (str(own.get(index, own.get(str(index)))), *(str(value[index]) for value in telling))
        for index in range(layers)
    ]
    chosen = _representatives(kinds)
    heads = config.get("num_attention_heads")
    if isinstance(heads, int) and isinstance(config.get("hidden_size"), int):
        scale = HEAD_DIM / (config.get("head_dim") or config["hidden_size"] // heads)
    result: dict[str, Any] = {}
    for key, value in config.items():
        if key in _LEFT_OUT or not isinstance(key, str):
            continue
        if key == "per_layer_config" and own:
            result[key] = {
                new: _small(own.get(old, own.get(str(old), {})), tokens)
                for new, old in enumerate(chosen)
                if old in own or str(old) in own
            }
        elif isinstance(value, Mapping):
            result[key] = (
                _small(value, tokens, scale) if all(isinstance(k, str) for k in value) else dict(value)
            )
        elif key == "mrope_section" and value:
            result[key] = _sections(value, scale)
        elif key in numbers:
            result[key] = list(range(len(chosen)))
        elif key in lists:
            result[key] = [_number(key, value[index], tokens) for index in chosen]
        elif isinstance(value, (list, tuple)) and ("layer" in key or key.endswith(("indexes", "idxs"))):
            whole = all(isinstance(item, int) for item in value)
            result[key] = (
                [0] if value and whole else [value[i] for i in _representatives([(str(v),) for v in value])]
            )
        else:
            result[key] = _number(key, value, tokens)
    if lists or own:
        result.update({key: len(chosen) for key in _LAYER_COUNTS if key in result})
    if isinstance(result.get("image_size"), int) and isinstance(result.get("patch_size"), int):
        result["image_size"] = 4 * result["patch_size"]
    if "expand" in config and "num_heads" in config:
        result["num_heads"] = 2 * HEADS
    if heads is not None and heads == config.get("num_key_value_heads") and "num_key_value_heads" in result:
        result["num_key_value_heads"] = result["num_attention_heads"]
    return result


def _representatives(kinds: Sequence[tuple[str, ...]]) -> list[int]:
    """Indices of layers, ascending: the first of each kind, two at least."""
    first: dict[tuple[str, ...], int] = {}
    for index, kind in enumerate(kinds):
        first.setdefault(kind, index)
    found = sorted(first.values())
    return found if len(found) > 1 else [0, 1][: len(kinds)]


def _sections(sections: Sequence[int], scale: float) -> list[int]:
    """Shares of half a head's rotated channels, as many in all as the smaller head has."""
    total = max(len(sections), round(sum(sections) * scale))
    first = [max(1, round(size * scale)) for size in sections[1:]]
    return [max(1, total - sum(first)), *first]


def _number(key: str, value: Any, tokens: Iterator[int]) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _TOKEN.fullmatch(key):
        return next(tokens)
    if key.endswith(("_id", "_index")):
        return value if value < 8 else 3
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, key):
            return min(size, value) if value >= 0 else value
    return value
