"""Tiny random models of many architectures, made from configs alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

_COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 128,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GPT2: dict[str, Any] = {**_COMMON, "n_embd": 64, "n_layer": 2, "n_head": 4}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_LLAMA, "num_hidden_layers": 3}),
    "llama-tied": ("LlamaConfig", {**_LLAMA, "tie_word_embeddings": True, "attention_bias": True}),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", _LLAMA),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**_LLAMA, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {**_LLAMA, "head_dim": 16, "sliding_window": 8}),
    "gemma3": ("Gemma3TextConfig", {**_LLAMA, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 6}),
    "phi": ("PhiConfig", _LLAMA),
    "phi3": ("Phi3Config", _LLAMA),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}),
    "opt": (
        "OPTConfig",
        {
            **_COMMON,
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
        },
    ),
    "falcon": (
        "FalconConfig",
        {**_COMMON, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "stablelm": ("StableLmConfig", _LLAMA),
    "gpt2": ("GPT2Config", {**_GPT2, "n_positions": 128}),
    "bloom": ("BloomConfig", {**_COMMON, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "starcoder2": ("Starcoder2Config", _LLAMA),
    "olmo2": ("Olmo2Config", _LLAMA),
    "cohere": ("CohereConfig", _LLAMA),
}


def blocks_key(name: str) -> str:
    """The entry of that model's config that says how many decoder blocks it has."""
    return "n_layer" if "n_layer" in CONFIGS[name][1] else "num_hidden_layers"


def tiny_model(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The tiny float32 model of this name, in evaluation mode, with weights that are not small.

    ``changes`` are arguments of its config.
    """
    config_class, arguments = CONFIGS[name]
    config = getattr(transformers, config_class)(**{**arguments, **changes})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # With the usual initialisation every block is nearly the identity.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


class InMemory:
    """A checkpoint in memory, from which a model instance reads tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.path = "memory"
        self.tensors = tensors

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name].clone()


def in_memory(model: PreTrainedModel) -> InMemory:
    """The tensors that saving ``model`` would write, without the second of two tied ones."""
    tensors = dict(model.state_dict())
    for name in getattr(model, "all_tied_weights_keys", {}):
        tensors.pop(name, None)
    return InMemory(tensors)
