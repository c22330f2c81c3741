"""Builds the model that a config describes, with parameters on the meta device (without memory)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from marlinq.core import boundaries
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.models.classes import auto_class, speaking_config
from marlinq.models.plausible import StoredTensor, bounded, check_counts, check_latent_heads


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
        dtype: dtype of the parameters.
        tensors: tensors of the checkpoint; a model that they can't fill is refused before it takes memory.

    Raises:
        CheckpointError: transformers does not know the architecture, or rejects the config.
        UnsupportedError: the model's code comes with the checkpoint and is not trusted.
    """
    plain = _checked(config, source, trust_remote_code, tensors)
    with boundaries.model_config(source, plain["model_type"]):
        parsed = _parsed(plain, source, trust_remote_code)
        auto = auto_class(parsed, plain, source)
        if tensors is not None:
            with bounded(tensors, source):
                auto.from_config(deepcopy(parsed), dtype=dtype, trust_remote_code=trust_remote_code)
        with parameters_on_meta():
            model = auto.from_config(parsed, dtype=dtype, trust_remote_code=trust_remote_code)
        model.eval()
        model.requires_grad_(False)
    check_latent_heads(model, source)
    result: PreTrainedModel = model
    return result


def parse_config(
    config: Mapping[str, Any],
    *,
    source: str,
    trust_remote_code: bool,
    tensors: Mapping[str, StoredTensor],
) -> PretrainedConfig:
    """``config`` with every setting that its class has, also those that the file leaves at their defaults.

    Args:
        config, source, trust_remote_code, tensors: as for :func:`build_on_meta`.

    Raises:
        CheckpointError: transformers does not know the architecture, or rejects the config.
        UnsupportedError: the model's code comes with the checkpoint and is not trusted.
    """
    plain = _checked(config, source, trust_remote_code, tensors)
    with boundaries.model_config(source, plain["model_type"]):
        return _parsed(plain, source, trust_remote_code)


def _checked(
    config: Mapping[str, Any],
    source: str,
    trust_remote_code: bool,
    tensors: Mapping[str, StoredTensor] | None,
) -> dict[str, Any]:
    """``config`` without its quantisation and with plain numbers, as far as it can be checked unparsed."""
    plain = {key: _plain(value) for key, value in config.items() if key != "quantization_config"}
    if not plain.get("model_type"):
        raise CheckpointError(f"{source}/config.json: no model_type; expected the config of a language model")
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
    return plain


def _parsed(plain: Mapping[str, Any], source: str, trust_remote_code: bool) -> PretrainedConfig:
    if "auto_map" not in plain or not trust_remote_code:
        return speaking_config(AutoConfig.for_model(**plain))
    parsed: PretrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=True)
    if getattr(parsed, "quantization_config", None) is not None:
        del parsed.quantization_config
    return parsed


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, new parameters go to the meta device at once; buffers stay real.

    Parameters get transformers' mark of loaded ones, so that it does not initialise them, which on the meta
    device takes longer than building the modules.
    """

    def to_meta(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        moved = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        moved.__dict__.update(parameter.__dict__)
        moved._is_hf_initialized = True  # type: ignore[attr-defined]
        return moved

    # The hook's return value replaces the parameter, which its declared type does not say.
    handle = hooks.register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with _LargeOnMeta():
            yield
    finally:
        handle.remove()


class _LargeOnMeta(TorchFunctionMode):
    """Makes large parameters on the meta device before they are registered, so that they never take memory.
    Their size tells them from buffers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty and kwargs.get("device") is None and "size" not in kwargs:
            sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
            if math.prod(sizes) > _LARGE_PARAMETER:
                kwargs["device"] = "meta"
        return func(*args, **kwargs)


_LARGE_PARAMETER = 1 << 26
"""number of values from which a tensor counts as a large parameter"""

_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def _plain(value: Any) -> Any:
    """A config value in which ``{"__float__": "Infinity"}``, transformers' JSON for infinity and NaN, is
    replaced by the number (Nemotron-H has one)."""
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
