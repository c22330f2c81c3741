"""Tiny random decoders whose parameters are never 0, 1 or small by default, so that mistakes show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

WINDOW = 6

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
_BASE: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_HEADS: dict[str, Any] = {**_BASE, "head_dim": 24}
_WITHOUT_GROUPS = {key: value for key, value in _BASE.items() if key != "num_key_value_heads"}
_GPT2: dict[str, Any] = {
    "vocab_size": 96,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 64,
}
_LATENT: dict[str, Any] = {
    **_BASE,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
}

_DELTA: dict[str, Any] = {
    **_HEADS,
    "num_hidden_layers": 4,  # the fourth attends
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


_MAMBA: dict[str, Any] = {
    **_HEADS,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}


def _rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **more}}


@dataclass(frozen=True)
class Decoder:
    """A transformers model type and its config."""

    model_type: str
    config: dict[str, Any]


KNOWN: dict[str, Decoder] = {
    "llama": Decoder("llama", _BASE),
    "llama-biases": Decoder("llama", {**_BASE, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": Decoder("llama", {**_BASE, "tie_word_embeddings": True}),
    "llama-no-groups": Decoder("llama", {**_BASE, "num_key_value_heads": 4}),
    "llama-linear-rope": Decoder("llama", {**_BASE, **_rope("linear", factor=4.0)}),
    "llama-llama3-rope": Decoder(
        "llama",
        {
            **_BASE,
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "llama-yarn": Decoder(
        "llama", {**_BASE, **_rope("yarn", factor=4.0, original_max_position_embeddings=32)}
    ),
    "llama-dynamic-rope": Decoder("llama", {**_BASE, **_rope("dynamic", factor=4.0)}),
    "mistral": Decoder("mistral", {**_HEADS, "sliding_window": WINDOW}),
    "ministral-3": Decoder("ministral3", _HEADS),
    "qwen2": Decoder(
        "qwen2", {**_BASE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": Decoder("qwen3", _HEADS),
    "gemma": Decoder("gemma", {**_HEADS, "num_key_value_heads": 1}),
    "gemma-2": Decoder(
        "gemma2",
        {
            **_HEADS,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma-3": Decoder(
        "gemma3_text",
        {
            **_HEADS,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi": Decoder("phi", _BASE),
    "phi-3": Decoder("phi3", {**_BASE, "partial_rotary_factor": 0.5, "sliding_window": WINDOW}),
    "phi-3-longrope": Decoder(
        "phi3",
        {
            **_BASE,
            "original_max_position_embeddings": 64,
            **_rope(
                "longrope",
                short_factor=[1.0 + 0.1 * step for step in range(8)],
                long_factor=[4.0] * 8,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "olmo": Decoder("olmo", _BASE),
    "olmo-2": Decoder("olmo2", _BASE),
    "olmo-3": Decoder("olmo3", {**_BASE, "sliding_window": WINDOW, "num_hidden_layers": 4}),
    "cohere": Decoder("cohere", _BASE),
    "cohere-2": Decoder("cohere2", {**_HEADS, "sliding_window": WINDOW, "num_hidden_layers": 4}),
    "granite": Decoder(
        "granite",
        {
            **_BASE,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "stablelm": Decoder("stablelm", {**_BASE, "use_qkv_bias": True}),
    "stablelm-parallel": Decoder("stablelm", {**_BASE, "use_parallel_residual": True}),
    "starcoder-2": Decoder("starcoder2", {**_BASE, "sliding_window": WINDOW}),
    "gpt-neox": Decoder("gpt_neox", _WITHOUT_GROUPS),
    "gpt-neox-sequential": Decoder("gpt_neox", {**_WITHOUT_GROUPS, "use_parallel_residual": False}),
    "gpt-2": Decoder("gpt2", _GPT2),
    "gpt-bigcode": Decoder("gpt_bigcode", _GPT2),
    "opt": Decoder("opt", _OPT),
    "biogpt": Decoder(
        "biogpt",
        {
            **_COMMON,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
    "smollm-3": Decoder("smollm3", {**_BASE, "num_hidden_layers": 5}),
    "glm": Decoder("glm", _HEADS),
    "glm-4": Decoder("glm4", _HEADS),
    "ernie-4.5": Decoder("ernie4_5", _HEADS),
    "exaone-4": Decoder("exaone4", {**_BASE, "sliding_window": WINDOW, "num_hidden_layers": 4}),
    "helium": Decoder("helium", {**_BASE, "head_dim": 16}),
    "nemotron": Decoder("nemotron", _HEADS),
    "persimmon": Decoder("persimmon", _WITHOUT_GROUPS),
    "arcee": Decoder("arcee", _HEADS),
    "seed-oss": Decoder("seed_oss", _HEADS),
}
"""Name -> decoder that recognition understands."""

KNOWN |= {
    "qwen3.5": Decoder("qwen3_5_text", _DELTA),
    "deepseek-v2": Decoder("deepseek_v2", {**_LATENT, "q_lora_rank": None}),
    "deepseek-v3": Decoder(
        "deepseek_v3",
        {
            **_LATENT,
            **_rope("yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.0, original_max_position_embeddings=32),
        },
    ),
    "minicpm-3": Decoder("minicpm3", {**_LATENT, "dim_model_base": 16}),
    "olmo-hybrid": Decoder("olmo_hybrid", _DELTA),
    "qwen3-next": Decoder("qwen3_next", {**_DELTA, "num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]}),
}

if "kimi_linear" in CONFIG_MAPPING:
    KNOWN["kimi-linear"] = Decoder(
        "kimi_linear",
        {
            **_LATENT,
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_num_heads": 2,
            "linear_head_dim": 12,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "num_expert_group": 1,
            "topk_group": 1,
        },
    )

KNOWN |= {
    "bamba": Decoder("bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "granite-4": Decoder(
        "granitemoehybrid",
        {
            **_MAMBA,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 8.0,
        },
    ),
    "mamba-2": Decoder(
        "mamba2",
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 32,
            "n_groups": 2,
            "state_size": 16,
            "chunk_size": 16,
        },
    ),
    "falcon-h1": Decoder(
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": 128,
            "ssm_multipliers": [0.5, 1.25, 0.75, 1.5, 2.0],
            "mlp_multipliers": [0.75, 0.4],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.3,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.6,
            "key_multiplier": 0.7,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.125,
        },
    ),
    "nemotron-h": Decoder(
        "nemotron_h",
        {
            **_HEADS,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 24,
            "chunk_size": 16,
            "time_step_min": 0.4,
        },
    ),
}
_NEMOTRON_EXPERTS: dict[str, Any] = {
    **KNOWN["nemotron-h"].config,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
}
KNOWN |= {
    "nemotron-h-experts": Decoder("nemotron_h", _NEMOTRON_EXPERTS),
    "nemotron-h-latent-experts": Decoder("nemotron_h", {**_NEMOTRON_EXPERTS, "moe_latent_size": 32}),
}
"""Name -> decoder with Mamba-2 mixers, or with blocks of a single part."""

_LFM2: dict[str, Any] = {
    **_BASE,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
KNOWN |= {
    "lfm2": Decoder("lfm2", _LFM2),
    "lfm2-biases": Decoder("lfm2", {**_LFM2, "conv_bias": True, "conv_L_cache": 4}),
    "lfm2-moe": Decoder(
        "lfm2_moe",
        {
            **_LFM2,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
}
"""Name -> decoder with short convolutions between gates."""

_GEMMA_4: dict[str, Any] = {
    **_HEADS,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 0,
}
KNOWN |= {
    "gemma-4": Decoder(
        "gemma4_text",
        {
            **_GEMMA_4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma-4-e": Decoder(
        "gemma4_text",
        {
            **_GEMMA_4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 16,
            "use_double_wide_mlp": True,
        },
    ),
}
KNOWN["gemma-4-moe"] = Decoder(
    "gemma4_text",
    {
        **KNOWN["gemma-4"].config,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
)
"""Name -> decoder with heads of several sizes: with keys that are values, and with vectors of layers."""

_GATED: dict[str, Any] = {**_HEADS, "num_attention_heads": 8, "sliding_window": WINDOW}
KNOWN |= {
    "afmoe": Decoder(
        "afmoe",
        {
            **_GATED,
            "num_dense_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "lfm3": Decoder(
        "lfm3",
        {
            **_GATED,
            "num_hidden_layers": 2,
            "layer_types": ["conv", "full_attention"],
            "use_attention_gate": True,
            "num_dense_layers": 2,
        },
    ),
    "laguna": Decoder(
        "laguna",
        {**_GATED, "layer_types": ["full_attention"] * 3, "mlp_layer_types": ["dense"] * 3},
    ),
}
_ROUTED: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 32}
KNOWN |= {
    "afmoe-one-expert": Decoder(
        "afmoe",
        {
            **KNOWN["afmoe"].config,
            **_ROUTED,
            "num_dense_layers": 0,
            "layer_types": ["full_attention"] * 2,
            "num_experts_per_tok": 1,
        },
    ),
    "laguna-experts": Decoder(
        "laguna",
        {
            **KNOWN["laguna"].config,
            **_ROUTED,
            "layer_types": ["full_attention"] * 2,
            "mlp_layer_types": ["dense", "sparse"],
            "num_experts_per_tok": 2,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "kolibri-1": Decoder("kolibri1", {**_HEADS, **_ROUTED, "num_experts_per_tok": 2}),
}
"""Name -> decoder whose attention's result is multiplied by factors of a linear."""

KNOWN |= {"hunyuan": Decoder("hunyuan_v1_dense", _HEADS), "nanochat": Decoder("nanochat", _BASE)}
"""Name -> decoder that normalises queries and keys behind their rotation."""

UNKNOWN: dict[str, tuple[Decoder, str, str]] = {
    "mamba": (
        Decoder("mamba", {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}),
        r"layers\.0\.mixer\.A_log",
        "no linear and no known norm",
    ),
    "recurrent-gemma": (Decoder("recurrent_gemma", _BASE), r"temporal_block\.rg_lru", "no linear"),
    "deepseek-v3.2": (Decoder("deepseek_v32", _LATENT), r"0\.self_attn", "an argument 'indices'"),
    "bloom": (
        Decoder("bloom", {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
        r"transformer\.h\.0",
        "biased by distance (alibi)",
    ),
    "mpt": (
        Decoder("mpt", {"vocab_size": 96, "d_model": 64, "n_heads": 4, "n_layers": 2}),
        r"transformer\.blocks\.0",
        "biased by distance (position_bias)",
    ),
    "falcon": (
        Decoder("falcon", {**_COMMON, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
        r"transformer\.h\.0",
        "attention interface",
    ),
    "diffllama": (Decoder("diffllama", _BASE), r"self_attn\.lambda", "no linear"),
    "cohere-query-norm": (
        Decoder("cohere", {**_BASE, "use_qk_norm": True}),
        r"0\.self_attn\.q_norm\.weight",
        "no linear and no known norm",
    ),
    "olmo-clipped": (Decoder("olmo", {**_BASE, "clip_qkv": 8.0}), r"0\.self_attn", "values are not those"),
    "opt-post-norm": (Decoder("opt", {**_OPT, "do_layer_norm_before": False}), "layer_norm", "block"),
    "opt-projected": (Decoder("opt", {**_OPT, "word_embed_proj_dim": 32}), "project_in", "first block"),
    "apertus": (Decoder("apertus", _HEADS), r"mlp\.act_fn\.", "no linear"),
    "bitnet": (Decoder("bitnet", _BASE), r"0\.self_attn\.o_proj", "result of attention"),
    "ministral-3-temperature": (
        Decoder(
            "ministral3",
            {
                **_HEADS,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10_000.0,
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 64,
                },
            },
        ),
        "Ministral3ForCausalLM",
        "at position 124",
    ),
}
"""Name -> (decoder that recognition refuses, regular expressions for the part and for the reason)."""


def random_decoder(decoder: Decoder, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with random weights: norms' near 1, biases near 0, none too small to matter. Skips the test
    where transformers is too old to know it."""
    if decoder.model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {decoder.model_type}")
    config = CONFIG_MAPPING[decoder.model_type](**decoder.config)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.75)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(0.3 * noise)
        elif "embed" in name or "wte" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    result: PreTrainedModel = model.to(dtype)
    return result
