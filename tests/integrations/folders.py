"""Checkpoints that every layout can hold and every byte of a text can be fed to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.testing.runnable_folders import random_quantizer, save_quantized
from tests.testing.tiny_models import blocks_key, tiny_model


def model(name: str, blocks: int | None = None) -> PreTrainedModel:
    """A tiny model whose vocabulary holds all bytes, and whose linears are whole Marlin tiles; with its usual
    number of blocks if None."""
    fewer = {} if blocks is None else {blocks_key(name): blocks}
    heads = {} if name == "gpt2" else {"num_key_value_heads": 4}
    built = tiny_model(name, vocab_size=320, **heads, **fewer)
    built.generation_config.eos_token_id = built.config.eos_token_id = None
    return built


def saved(folder: Path, name: str, layout: str = "gptq", blocks: int | None = None, **settings: Any) -> Path:
    save_quantized(folder, model(name, blocks), layout, random_quantizer(**settings))
    return folder
