"""Finds the transformers class of a checkpoint: the one that its config names, if it names one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from marlinq.core.errors import UnsupportedError

# In this order of preference where the config names no class.
_AUTO_CLASSES: tuple[Any, ...] = (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForImageTextToText,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)


def auto_class(config: PretrainedConfig, raw: Mapping[str, Any], source: str) -> Any:
    """The ``AutoModel...`` class that builds the model of ``config``.

    Checkpoints with a language head, those that read images or sounds besides text, and those without a head
    each have a class; ``architectures`` says which one the tensors belong to.

    Args:
        config: as transformers parsed it.
        raw: the content of ``config.json``.
        source: folder of the checkpoint, for messages.

    Raises:
        UnsupportedError: an encoder-decoder, or a model type without a decoder.
    """
    if "auto_map" in raw:
        own = raw["auto_map"] if isinstance(raw["auto_map"], dict) else {}
        mapped = (each for each in _AUTO_CLASSES if each.__name__ in own)
        return next(mapped, AutoModelForCausalLM)
    refuse_encoder_decoder(config, raw, source)
    named = _named(raw)
    known = [each for each in _AUTO_CLASSES if type(config) in each._model_mapping]
    chosen = next((each for each in known if named in _names(each, config)), None)
    if chosen is None and known:
        chosen = known[0]
    if chosen is None or not _reads_text(chosen, config):
        raise UnsupportedError(
            f"{source}: model type {config.model_type!r} has no language model that transformers builds from "
            "its config alone"
        )
    return chosen


def predicts_tokens(model: PreTrainedModel) -> bool:
    """Whether the model has an output head, which embedding models and classifiers lack."""
    return model.get_output_embeddings() is not None or model.can_generate()


def speaking_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the model that reads and writes text: ``config``, or the one inside it.

    A model that also speaks (Qwen-Omni) is several models in one folder: a thinker, which holds the text
    model, and others that turn its output into sound. Only the thinker takes token ids and returns logits.
    """
    text = config.get_text_config()
    for key in config.sub_configs:
        inner = getattr(config, key, None)
        if not isinstance(inner, PretrainedConfig) or inner is text or inner.get_text_config() is not text:
            continue
        if any(type(inner) in each._model_mapping for each in _AUTO_CLASSES):
            return inner
    return config


def refuse_encoder_decoder(config: PretrainedConfig, raw: Mapping[str, Any], source: str) -> None:
    """Raises UnsupportedError where ``config`` says that a decoder reads an encoder's output.

    Models whose code is in the folder are not judged by that flag.
    """
    named = _named(raw) or ""
    flag = getattr(config, "is_encoder_decoder", False) and "auto_map" not in raw
    if flag and not named.endswith("ForCausalLM"):
        raise UnsupportedError(
            f"{source}: {named or config.model_type} is an encoder-decoder: layers of its decoder read an "
            "encoder's output; marlinq quantises models that are a decoder alone"
        )


def _named(raw: Mapping[str, Any]) -> str | None:
    """The first of ``architectures``."""
    names = raw.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _reads_text(auto: Any, config: PretrainedConfig) -> bool:
    """Whether the class takes token ids; classes with a language head always do."""
    if auto is not AutoModel:
        return True
    model_class = auto._model_mapping[type(config)]
    classes = model_class if isinstance(model_class, tuple) else (model_class,)
    return any(each.main_input_name == "input_ids" for each in classes)


def _names(auto: Any, config: PretrainedConfig) -> list[str]:
    """Names of the classes that ``auto`` has for ``config``."""
    classes: type[PreTrainedModel] | tuple[type[PreTrainedModel], ...] = auto._model_mapping[type(config)]
    return [each.__name__ for each in (classes if isinstance(classes, tuple) else (classes,))]
