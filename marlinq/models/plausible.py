"""Is the model that a config describes one that the stored tensors can fill? Decided before it is built.

A config of a few hundred bytes can describe a million layers or a table of terabytes. Some numbers are
refused as they stand; then the model is built once without any memory, and the count of its modules,
parameters and buffers is bounded as it grows by what the tensors could hold.
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

# transformers makes lists of these lengths as it reads a config, before there is a module to count.
_COUNTS = re.compile(r"(?:n|num)_(?:\w+_)?(?:layers?|blocks?)|(?:\w+_)?layers|depth|num_labels")
_COUNT_SLACK = 1_024
# A stored byte holds two 4-bit weights, and a tied head is built as a matrix of its own.
_PARAMETERS_PER_BYTE = 4
_PARAMETER_SLACK = 1 << 20
# Of masks and rotary tables; those of real models take a few hundred megabytes at most.
_BUFFER_BYTES = 1 << 30
_MODULES_PER_TENSOR = 16


class StoredTensor(Protocol):
    """What is known of a stored tensor without reading it."""

    @property
    def nbytes(self) -> int: ...


def check_counts(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], source: str) -> None:
    """Refuse a count of layers above the number of tensors: every layer has at least one.

    Raises:
        CheckpointError: the key, its value and the number of tensors.
    """
    most = len(tensors) + _COUNT_SLACK
    for key, value in _integers(config):
        if _COUNTS.fullmatch(key) and value > most:
            raise CheckpointError(
                f"{source}/config.json: {key} is {value}, but there are {len(tensors)} tensors; "
                "config.json describes another model"
            )


def _integers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Keys and values of all integers, those of inner objects too."""
    levels = [config]
    while levels:
        for key, value in levels.pop().items():
            if isinstance(value, dict):
                levels.append(value)
            elif isinstance(value, int):
                yield key, value


@contextmanager
def bounded(tensors: Mapping[str, StoredTensor], source: str) -> Iterator[None]:
    """Building a model inside stops when it outgrows ``tensors``; everything is built on the meta device.

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
