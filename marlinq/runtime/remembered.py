"""What recognition and the tokenizer's files came to, kept beside the compiled kernels for later processes.

An entry is named for everything that it rests on, versions and this package's own files included, and begins
with the digest of what follows. One that is damaged counts as none. Nothing decodes on its word alone: an
anatomy that was read from here is compared with transformers' forward as one that was just found is, since
the note of a passed comparison (:mod:`marlinq.runtime.step.passed`) is named for the anatomy, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from transformers import PreTrainedModel

from marlinq.core.kept import read_note, write_note
from marlinq.core.plain_values import load_json
from marlinq.kernels.driver.notes import code_digest
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

_PACKAGE = Path(__file__).parents[1]
_KINDS = {
    kind.__name__: kind
    for kind in (Anatomy, Attention, DeltaNet, Groups, Layer, Mixture, MLP, Norm, Rotary, Router, Slices)
}
# No field of a part is called so.
_KIND = "class"
_Value = TypeVar("_Value")


def recognise_once(model: PreTrainedModel, blocks_name: str) -> Anatomy | Unrecognised:
    """As :func:`marlinq.models.recognise.recognise`, whose anatomy is remembered; a refusal never is.

    Code that a checkpoint brings is recognised every time: what it is, its name does not tell.
    """
    kind = type(model)
    if not kind.__module__.startswith("transformers."):
        return recognise(model, blocks_name)
    config = model.config.to_json_string()
    name = entry_name("anatomy", (kind.__module__, kind.__qualname__, config, model.dtype, blocks_name))
    kept = read_entry(name, _anatomy)
    if kept is not None:
        return kept
    found = recognise(model, blocks_name)
    if isinstance(found, Anatomy):
        write_entry(name, _plain(found))
    return found


def entry_name(what: str, premises: object) -> str:
    """The file name of an entry that rests on ``premises``, whose ``repr`` tells them apart."""
    versions = torch.__version__, transformers.__version__
    key = hashlib.sha256(repr((premises, versions, code_digest(_PACKAGE / "models"))).encode()).hexdigest()
    return f"{what}-{key[:32]}.json"


def read_entry(name: str, made_of: Callable[[Any], _Value]) -> _Value | None:
    """What ``made_of`` makes of an entry's value; None where there is none, or a damaged one."""
    digest, _, content = (read_note(name) or b"").partition(b"\n")
    if digest != hashlib.sha256(content).hexdigest().encode():
        return None
    try:
        return made_of(load_json(content))
    except (ValueError, TypeError, KeyError):
        return None


def write_entry(name: str, value: object) -> None:
    """Keep a plain value; nothing where the folder can't be written, since it can be found out again."""
    content = json.dumps(value).encode()
    write_note(name, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


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
