"""The decoder families that the installed transformers knows, and a tiny random model of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from lab.models.shrink import shrunk

_MOST_PARAMETERS = 12_000_000
_DRAFTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""model types that read the keys of the model that they draft for, and can't run alone"""


@dataclass(frozen=True)
class Family:
    """A model class of transformers.

    Attributes:
        model_type: as ``config.json`` has it.
        architecture: name of the class.
        wrapper: it takes images, sounds or videos besides text.
    """

    model_type: str
    architecture: str
    wrapper: bool

    @property
    def name(self) -> str:
        """The model type; with the class where the type has several."""
        return self.model_type


class NotBuilt(Exception):
    """transformers can't build or run the tiny model here; the message says why."""


def families() -> Iterator[Family]:
    """Text families first. A class that only reads the text part of a wrapper's config is left out: the
    family of that part has it already."""
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if _class(architecture).config_class is CONFIG_MAPPING[model_type]:
            yield Family(model_type, architecture, wrapper=architecture.endswith("ForConditionalGeneration"))
    for model_type, architecture in {
        **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    }.items():
        if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) != architecture:
            yield Family(model_type, architecture, wrapper=True)


def random_model(family: Family, *, seed: int = 0) -> PreTrainedModel:
    """A float32 model on the CPU: weights of norms about one, biases about zero, none too small to see.

    Raises:
        NotBuilt: the shrunk config does not fit the class, or a package is missing.
    """
    if family.model_type in _DRAFTS:
        raise NotBuilt("reads the keys of the model that it drafts for")
    torch.manual_seed(seed)
    model_class = _class(family.architecture)
    config_class = CONFIG_MAPPING[family.model_type]
    try:
        config = config_class(**shrunk(family.model_type, config_class().to_dict()))
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model_class(config).parameters())
        if size > _MOST_PARAMETERS:
            raise NotBuilt(f"the rules left {size / 1e6:.0f} million parameters")
        model: PreTrainedModel = model_class(config).eval().requires_grad_(False)
    except (ImportError, ModuleNotFoundError) as error:
        raise NotBuilt(f"needs {_package(error)}") from None
    except NotBuilt:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises is a row of the table
        raise NotBuilt(f"{type(error).__name__}: {' '.join(str(error).split())[:160]}") from None
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.add_(0.1 * noise)
        elif "embed" in name or "wte" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return model


def _class(architecture: str) -> type[PreTrainedModel]:
    return getattr(transformers, architecture)


def _package(error: ImportError) -> str:
    text = " ".join(str(error).split())
    return error.name or ("timm and pillow" if "PIL" in text or "timm" in text else text[:80])
