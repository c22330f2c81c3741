"""A note of what recognition came to (:mod:`marlinq.core.notes`).

Nothing decodes on its word alone: an anatomy that was read from here is compared with transformers' forward
as one that was just found is, since the note of a passed comparison
(:mod:`marlinq.runtime.step.probe_results`) is
named for the anatomy, too.
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
    DeltaNet,
    Groups,
    Layer,
    Mixture,
    Norm,
    Rotary,
    Router,
    Slices,
    Unrecognised,
)
from marlinq.models.recognise import recognise

_KINDS = {
    kind.__name__: kind
    for kind in (Anatomy, Attention, DeltaNet, Groups, Layer, Mixture, MLP, Norm, Rotary, Router, Slices)
}
# No field of a part is called so.
_KIND = "class"


def recognise_once(model: PreTrainedModel, blocks_name: str) -> Anatomy | Unrecognised:
    """As :func:`marlinq.models.recognise.recognise`, whose anatomy is remembered; a refusal never is.

    Code that a checkpoint brings is recognised every time: what it is, its name does not tell.
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
    found = recognise(model, blocks_name)
    if isinstance(found, Anatomy):
        note(name, _plain(found))
    return found


def _plain(value: object) -> object:
    """Dataclasses as objects that name their kind, tuples as lists."""
    if is_dataclass(value):
        parts = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {_KIND: type(value).__name__, **parts}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value


def _made(value: Any) -> Any:
    """The opposite of :func:`_plain`."""
    if isinstance(value, dict):
        parts = {key: _made(each) for key, each in value.items()}
        return _KINDS[parts.pop(_KIND)](**parts)
    if isinstance(value, list):
        return tuple(_made(each) for each in value)
    return value


def _anatomy(value: Any) -> Anatomy:
    found = _made(value)
    if not isinstance(found, Anatomy):
        raise TypeError("an anatomy was expected")
    return found
