"""Tiny random mixtures of experts, their folders, and faults in quantised ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.testing.runnable_folders import save_tokenizer

_BASE: dict[str, Any] = {
    "vocab_size": 288,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_HEADS = {**_BASE, "head_dim": 16}
_ROUTED: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    **_BASE,
    **_ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
_LINEAR_ATTENTION: dict[str, Any] = {
    **_HEADS,
    **_ROUTED,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@dataclass(frozen=True)
class Mixture:
    """A model type, its config, and the names of experts in files.

    In files that transformers writes for a ``fused`` family, experts have no tensors of their own.
    """

    model_type: str
    config: dict[str, Any]
    experts: str = "model.layers.1.mlp.experts"
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    router: str = "model.layers.1.mlp.gate"
    fused: bool = False


_MIXTRAL = {
    "experts": "model.layers.1.block_sparse_moe.experts",
    "parts": ("w1", "w3", "w2"),
    "router": "model.layers.1.block_sparse_moe.gate",
}

MIXTURES: dict[str, Mixture] = {
    "mixtral": Mixture("mixtral", {**_BASE, "intermediate_size": 32, "num_local_experts": 4}, **_MIXTRAL),
    "qwen2-moe": Mixture(
        "qwen2_moe",
        {
            **_BASE,
            **_ROUTED,
            "num_experts": 4,
            "shared_expert_intermediate_size": 32,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3-moe": Mixture("qwen3_moe", {**_HEADS, **_ROUTED, "num_experts": 4}),
    "qwen3.5-moe": Mixture("qwen3_5_moe_text", _LINEAR_ATTENTION),
    "qwen3-next": Mixture("qwen3_next", _LINEAR_ATTENTION),
    "deepseek-v2": Mixture("deepseek_v2", {**_LATENT, "topk_method": "greedy", "n_group": 1}),
    "deepseek-v3": Mixture("deepseek_v3", {**_LATENT, "n_group": 2}),
    "glm-4.5": Mixture(
        "glm4_moe",
        {
            **_HEADS,
            **_ROUTED,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "olmoe": Mixture("olmoe", {**_BASE, "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "minimax-m2": Mixture(
        "minimax_m2",
        {**_HEADS, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        **_MIXTRAL,
    ),
    "llama-4": Mixture(
        "llama4_text",
        {
            **_HEADS,
            "intermediate_size": 32,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
        },
        experts="model.layers.1.feed_forward.experts",
        router="model.layers.1.feed_forward.router",
        fused=True,
    ),
    "gpt-oss": Mixture(
        "gpt_oss",
        {**_HEADS, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        router="model.layers.1.mlp.router",
        fused=True,
    ),
    "granite-moe": Mixture(
        "granitemoe",
        {**_BASE, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        experts="model.layers.1.block_sparse_moe.experts",
        parts=("w1", "w3", "w2"),
        router="model.layers.1.block_sparse_moe.router.layer",
        fused=True,
    ),
    "nemotron-h": Mixture(
        "nemotron_h",
        {
            **_HEADS,
            **_ROUTED,
            "n_routed_experts": 4,
            "layer_types": ["attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 16,
            "moe_shared_expert_intermediate_size": 32,
        },
        experts="backbone.layers.1.mixer.experts",
        parts=("up_proj", "down_proj"),
        router="backbone.layers.1.mixer.gate",
    ),
}


def calibration_text(folder: Path, lines: int = 60) -> Path:
    """A file of short passages."""
    path = folder / "calibration.txt"
    passages = (
        f"The quick brown fox {i} jumps over {i * i} lazy dogs, says hen {7 * i}." for i in range(lines)
    )
    path.write_text("\n\n".join(passages))
    return path


def random_mixture(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> PreTrainedModel:
    """The model with random weights that are not small, different experts, and correction biases near 0.

    ``changes`` are arguments of its config.
    """
    mixture = MIXTURES[name]
    config = CONFIG_MAPPING[mixture.model_type](**{**mixture.config, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn(value.shape, generator=generator)
        if "correction_bias" in key:
            value.copy_(0.05 * noise)
        elif isinstance(value, torch.nn.Parameter) and value.dim() == 1:
            value.add_(0.2 * noise)
        elif "embed" in key:
            value.copy_(noise)
        elif isinstance(value, torch.nn.Parameter):
            fan_in = mixture.config["hidden_size"] if value.dim() == 3 else value.shape[-1]
            value.copy_(noise * fan_in**-0.5)
    result: PreTrainedModel = model.to(dtype)
    return result


def save_mixture(folder: Path, name: str, *, fused: bool = False, **settings: Any) -> PreTrainedModel:
    """Writes a random mixture to ``folder``: as transformers does, or with ``fused`` as it is in memory."""
    model = random_mixture(name, **settings)
    model.save_pretrained(folder)
    if fused:
        tensors = {key: value.contiguous() for key, value in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(folder)
    return model
