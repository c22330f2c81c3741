"""A config that describes a model which the stored tensors can't fill is refused before it takes anything."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from marlinq.core.errors import CheckpointError
from marlinq.models import build_blueprint
from marlinq.runtime import load
from tests.testing.decoders import KNOWN
from tests.testing.runnable_folders import random_quantizer, save_quantized
from tests.testing.tiny_models import CONFIGS, tiny_model


class Stored:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def stored(config_name: str) -> tuple[dict[str, Any], dict[str, Stored]]:
    model = tiny_model(config_name)
    # Half a byte a weight, as a 4-bit checkpoint has.
    return model.config.to_dict(), {name: Stored(p.numel() // 2) for name, p in model.named_parameters()}


ABSURD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_hidden_layers": 1_000_000_000}),
    ("llama", {"num_hidden_layers": 1_000, "layer_types": None}),
    ("llama", {"hidden_size": 1 << 30, "num_attention_heads": 4}),
    ("llama", {"intermediate_size": 1 << 40}),
    ("llama", {"vocab_size": 1 << 45}),
    ("llama", {"num_attention_heads": 1 << 20, "head_dim": 1 << 20}),
    ("llama", {"num_labels": 1_000_000_000}),
    ("gpt2", {"n_layer": 1 << 30}),
    ("gpt2", {"n_positions": 1 << 40}),
    ("bloom", {"n_layer": 100_000}),
    ("opt", {"max_position_embeddings": 1 << 40}),
]


@pytest.mark.parametrize(("name", "changes"), ABSURD, ids=lambda value: str(value)[:40])
def test_absurd_sizes_cost_no_time_and_no_memory(name: str, changes: dict[str, Any]) -> None:
    config, tensors = stored(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(CheckpointError, match=r"^somewhere/config\.json: "):
        build_blueprint({**config, **changes}, source="somewhere", tensors=tensors)
    # Seconds of the processor: the machine may be busy. The figures without the check: 20 s and 2.4 GB.
    assert time.process_time() - start < 2
    # Kilobytes on Linux.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("name", CONFIGS)
def test_every_real_architecture_fits_into_its_own_tensors(name: str) -> None:
    config, tensors = stored(name)
    model = build_blueprint(config, source="somewhere", tensors=tensors).build()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert torch.get_default_device() == torch.device("cpu")


def test_loading_refuses_absurd_configs_first(tmp_path: Path) -> None:
    save_quantized(tmp_path, tiny_model("llama"), "gptq", random_quantizer())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1 << 40}))
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is \d+, but there are \d+ tensors"):
        load(tmp_path, device="cpu")


def test_keys_of_latent_attention_are_never_repeated() -> None:
    """transformers' forward ended in a traceback, at calibration or the first token."""
    known = KNOWN["deepseek-v3"]
    config = {**known.config, "model_type": known.model_type}
    assert build_blueprint(config, source="model").blocks
    wanted = (
        r"model/config.json: num_key_value_heads: expected 4, .*layers\.0\.self_attn.* found 2; set it to 4"
    )
    with pytest.raises(CheckpointError, match=wanted):
        build_blueprint({**config, "num_key_value_heads": 2}, source="model")
