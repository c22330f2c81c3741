"""Keep recognised anatomies in notes of the cache folder (:mod:`marlinq.core.notes`).

An anatomy from a note is trusted no more than a newly recognised one: it is compared with transformers'
forward, unless a comparison of this anatomy has passed (:mod:`marlinq.runtime.step.probe_results`).
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from marlinq.core.notes import note, note_name, noted
from marlinq.models.anatomy import (
    MLP,
    Anatomy,
    Attention,
    ChannelRates,
    DeltaNet,
    GatedConvolution,
    Groups,
    InputGate,
    LatentAttention,
    Layer,
    LayerInputs,
    Mamba,
    Mixture,
    Norm,
    Rotary,
    Router,
    Scales,
    Slices,
    Unrecognised,
)
from marlinq.models.recognise import recognise

_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Anatomy, Attention, DeltaNet, GatedConvolution, Groups, LatentAttention, Layer, Mamba, Mixture),
        *(ChannelRates, InputGate, LayerInputs, MLP, Norm, Rotary, Router, Scales, Slices),
    )
}
# Key of the class's name in JSON; no field has this name.
_KIND = "class"


def recognise_once(model: PreTrainedModel, blocks_name: str) -> Anatomy | Unrecognised:
    """:func:`marlinq.models.recognise.recognise`, with its anatomy kept in a note; refusals are not kept.

    Models of code that a checkpoint brings are always recognised anew, since a class name does not identify
    the code.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers."):
        return recognise(model, blocks_name)
    config = model.config.to_json_string()
    versions = torch.__version__, transformers.__version__
    premises = kind.__module__, kind.__qualname__, config, model.dtype, blocks_name, versions
    name = note_name("anatomy", premises, ("models",))
    kept = noted(name, _anatomy)
    if kept is not None:
        return kept
    anatomy = recognise(model, blocks_name)
    if isinstance(anatomy, Anatomy):
        note(name, _plain(anatomy))
    return anatomy


def _plain(value: object) -> object:
    """Dataclasses as JSON objects with the name of their class, tuples as lists."""
    if is_dataclass(value):
        parts = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {_KIND: type(value).__name__, **parts}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _made(value: Any) -> Any:
    """The inverse of :func:`_plain`."""
    if isinstance(value, dict):
        parts = {key: _made(each) for key, each in value.items()}
        return _KINDS[parts.pop(_KIND)](**parts)
    if isinstance(value, list):
        return tuple(_made(each) for each in value)
    return value


def _anatomy(value: Any) -> Anatomy:
    anatomy = _made(value)
    if not isinstance(anatomy, Anatomy):
        raise TypeError("an anatomy was expected")
    return anatomy
