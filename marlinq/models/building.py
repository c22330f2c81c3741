"""The model that a config describes, built by transformers with its parameters on the meta device."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from copy import deepcopy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from marlinq.core import boundaries
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.models.plausible import StoredTensor, bounded, check_counts


def build_on_meta(
    config: Mapping[str, Any],
    *,
    source: str,
    trust_remote_code: bool,
    dtype: torch.dtype,
    tensors: Mapping[str, StoredTensor] | None = None,
) -> PreTrainedModel:
    """A new model with parameters on the meta device; buffers (rotary frequencies) are real, on the CPU.

    Args:
        config: the content of ``config.json``; a ``quantization_config`` in it is ignored.
        source: folder of the checkpoint, for error messages and for its code files.
        trust_remote_code: run model code that the checkpoint brings.
        dtype: of the parameters.
        tensors: what the checkpoint stores; a model that they can't fill is refused before it takes memory.

    Raises:
        CheckpointError: transformers does not know the architecture, or rejects the config.
        UnsupportedError: the model's code comes with the checkpoint and is not trusted.
    """
    from accelerate import init_empty_weights

    plain = {key: _plain(value) for key, value in config.items() if key != "quantization_config"}
    if not plain.get("model_type"):
        raise CheckpointError(
            f"{source}/config.json: no model_type; expected a transformers causal language model"
        )
    if not isinstance(plain["model_type"], str):
        raise CheckpointError(
            f"{source}/config.json: model_type: expected a name, found {plain['model_type']!r}"
        )
    if "auto_map" in plain and not trust_remote_code and plain["model_type"] not in _known_model_types():
        raise UnsupportedError(
            f"{source}: model type {plain['model_type']!r} needs code from the checkpoint; "
            "read that code and pass --trust-remote-code to run it"
        )
    if tensors is not None:
        check_counts(plain, tensors, source)
    with boundaries.model_config(source, plain["model_type"]):
        if "auto_map" in plain and trust_remote_code:
            parsed = AutoConfig.from_pretrained(source, trust_remote_code=True)
            if getattr(parsed, "quantization_config", None) is not None:
                del parsed.quantization_config
        else:
            parsed = AutoConfig.for_model(**plain)
        if tensors is not None:
            with bounded(tensors, source):
                AutoModelForCausalLM.from_config(
                    deepcopy(parsed), dtype=dtype, trust_remote_code=trust_remote_code
                )
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(parsed, dtype=dtype, trust_remote_code=trust_remote_code)
        # accelerate moves each parameter to the meta device on its own, which unties shared ones.
        model.tie_weights()
        model.eval()
        model.requires_grad_(False)
    result: PreTrainedModel = model
    return result


_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _plain(value: Any) -> Any:
    """A value of a config with the numbers for what JSON has none for: transformers writes them as
    ``{"__float__": "Infinity"}``, Nemotron-H's limit of time steps for one."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("__float__")
    if len(value) == 1 and isinstance(tag, str) and tag in _FLOATS:
        return _FLOATS[tag]
    return {key: _plain(item) for key, item in value.items()}


def _known_model_types() -> Collection[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return set(CONFIG_MAPPING.keys())
