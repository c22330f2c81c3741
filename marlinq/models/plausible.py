"""Refuses configs of models that the stored tensors can't fill, before such a model takes memory.

A config of a few hundred bytes can describe a million layers or a table of terabytes. Absurd counts are
refused first. Then the model is built once on the meta device, and its modules, parameters and buffers are
counted against limits that follow from the stored tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from marlinq.core.errors import CheckpointError

# Keys of counts for which transformers makes lists as soon as it reads a config.
_COUNTS = re.compile(r"(?:n|num)_(?:\w+_)?(?:layers?|blocks?)|(?:\w+_)?layers|depth|num_labels")
_COUNT_SLACK = 1_024
_PARAMETERS_PER_BYTE = 4
"""parameters per stored byte, at most: two 4-bit weights, times two because a tied head is built
separately"""
_PARAMETER_SLACK = 1 << 20
_BUFFER_BYTES = 1 << 30
"""bytes of buffers, at most; masks and rotary tables of real models take a few hundred megabytes"""
_MODULES_PER_TENSOR = 16


class StoredTensor(Protocol):
    """A stored tensor's size, known without reading it."""

    @property
    def nbytes(self) -> int: ...


def check_counts(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], source: str) -> None:
    """Checks that no count of layers is above the number of tensors, since every layer has at least one.

    Raises:
        CheckpointError: one is; the message names the key, its value and the number of tensors.
    """
    most = len(tensors) + _COUNT_SLACK
    for key, value in _integers(config):
        if _COUNTS.fullmatch(key) and value > most:
            raise CheckpointError(
                f"{source}/config.json: {key} is {value}, but there are {len(tensors)} tensors; "
                "config.json describes another model"
            )


def check_latent_heads(model: nn.Module, source: str) -> None:
    """Checks that latent attention does not repeat its keys, of which every head has its own.

    Servers ignore num_key_value_heads there; transformers' forward fails unless it is num_attention_heads.

    Raises:
        CheckpointError: it does; the message names the module and the number of heads.
    """
    for name, module in model.named_modules():
        held = vars(module)
        groups, heads = held.get("num_key_value_groups"), held.get("num_heads")
        if "qk_nope_head_dim" in held and isinstance(groups, int) and groups > 1:
            found = getattr(held.get("config"), "num_key_value_heads", None)
            raise CheckpointError(
                f"{source}/config.json: num_key_value_heads: expected {heads}, since every head of {name}, "
                f"latent attention, has keys of its own, found {found}; set it to {heads}"
            )


def _integers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(key, value) of all integers in a config, also in nested objects."""
    levels = [config]
    while levels:
        for key, value in levels.pop().items():
            if isinstance(value, dict):
                levels.append(value)
            elif isinstance(value, int):
                yield key, value


@contextmanager
def bounded(tensors: Mapping[str, StoredTensor], source: str) -> Iterator[None]:
    """Inside, models are built on the meta device, and one that ``tensors`` can't fill is refused.

    Raises:
        CheckpointError: the model has too many modules or parameters, or too large buffers.
    """
    stored = sum(info.nbytes for info in tensors.values())
    limits = {
        "modules": _MODULES_PER_TENSOR * (len(tensors) + _COUNT_SLACK),
        "parameters": _PARAMETERS_PER_BYTE * stored + _PARAMETER_SLACK,
        "bytes of buffers": _BUFFER_BYTES + stored,
    }
    counts = dict.fromkeys(limits, 0)

    def count(what: str, amount: int) -> None:
        counts[what] += amount
        if counts[what] > limits[what]:
            raise CheckpointError(
                f"{source}/config.json: describes a model of more than {limits[what]} {what}, but the "
                f"{len(tensors)} tensors have {stored} bytes; config.json describes another model"
            )

    def module(owner: nn.Module, name: str, value: nn.Module | None) -> None:
        count("modules", 1)

    def parameter(owner: nn.Module, name: str, value: nn.Parameter | None) -> None:
        count("parameters", 0 if value is None else value.numel())

    def buffer(owner: nn.Module, name: str, value: Tensor | None) -> None:
        count("bytes of buffers", 0 if value is None else value.numel() * value.itemsize)

    with ExitStack() as stack:
        registrations: tuple[tuple[Callable[..., Any], Callable[..., None]], ...] = (
            (hooks.register_module_module_registration_hook, module),
            (hooks.register_module_parameter_registration_hook, parameter),
            (hooks.register_module_buffer_registration_hook, buffer),
        )
        for register, hook in registrations:
            stack.callback(register(hook).remove)
        stack.enter_context(torch.device("meta"))
        yield
