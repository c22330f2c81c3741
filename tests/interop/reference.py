"""A dense transformers model with the weights of a quantised checkpoint, as marlinq decodes them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint


def open_quantized(folder: Path) -> QuantizedCheckpoint:
    quantized = QuantizedCheckpoint.of(Checkpoint.open(folder))
    assert quantized is not None
    return quantized


def dense_logits(folder: Path, tokens: Tensor, *, rounded: bool) -> Tensor:
    """Float32 logits; ``rounded`` casts dequantised weights to their scales' dtype, as the peers do."""
    quantized = open_quantized(folder)
    checkpoint = quantized.checkpoint
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict(config), dtype=torch.float32)
    state = {name: checkpoint.tensor(name).float() for name in quantized.passthrough}
    for name in quantized.modules:
        q = quantized.load(name)
        state[f"{name}.weight"] = q.dequantize(q.scales.dtype if rounded else torch.float32).float()
    model.load_state_dict(state)
    with torch.no_grad():
        return model.eval()(tokens).logits
