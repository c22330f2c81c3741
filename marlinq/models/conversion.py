"""Stored tensors that become parameters of the model by more than a new name.

Files of some families hold matrices that the module tree has in parts, joined, transposed or with their rows
in another order: a ``qkv`` of a vision tower, the three short convolutions of a delta net. transformers has
a rule for each (``WeightConverter``). Here the rules are run as they are, tensor by tensor, behind a view of
the checkpoint whose tensors are the model's parameters; so nobody else has to know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import WeightTransform, dot_natural_key

from marlinq.checkpoint import Checkpoint, DerivedCheckpoint, TensorInfo
from marlinq.core.dtypes import ITEM_BYTES, dtype_name, torch_dtype
from marlinq.core.errors import CheckpointError
from marlinq.models.blueprint import Blueprint
from marlinq.models.names import TensorNames, name_in_memory

Read = Callable[[str], Tensor]
"""The stored tensor of a name."""


@dataclass(frozen=True)
class Conversion:
    """Stored tensors that together make some parameters of the model.

    Attributes:
        stored: names of the stored tensors, in the order of their numbers.
        parameters: dtype and shape of every parameter that they make, by full name.
        convert: makes the parameters from the stored tensors, in the order of :attr:`stored`.
    """

    stored: tuple[str, ...]
    parameters: Mapping[str, tuple[str, tuple[int, ...]]]
    convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]

    def value(self, parameter: str, read: Read) -> Tensor:
        """One of :attr:`parameters`, on the device that ``read`` gives tensors on."""
        return self.convert([read(name) for name in self.stored])[parameter].contiguous()


def find_conversions(
    blueprint: Blueprint, tensors: Mapping[str, TensorInfo], *, source: str, packed: Collection[str] = ()
) -> tuple[Conversion, ...]:
    """What has to be converted of a checkpoint; nothing of one that is stored as the module tree is.

    Fused experts whose matrices are stored one by one are left out: :meth:`TensorNames.places` has them.

    Args:
        blueprint: the model.
        tensors: all stored tensors.
        source: folder of the checkpoint, for messages.
        packed: tensors of quantised modules, which no rule is about.

    Raises:
        CheckpointError: stored tensors do not fit their rule.
    """
    if not blueprint.converters:
        return ()
    places = {
        **blueprint.parameters,
        **{name: blueprint.parameters[to] for name, to in blueprint.tied.items()},
    }
    found: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    names: TensorNames | None = None
    for stored in sorted(set(tensors) - set(packed), key=dot_natural_key):
        rule, pattern, parameter = _matching_rule(blueprint, stored, places)
        if rule is None or pattern is None or parameter not in places:
            # A layer that the model does not run is carried as it is stored.
            continue
        names = names or TensorNames(blueprint, tensors, source=source)
        if names.in_parts(parameter):
            continue
        if names.own(parameter) == stored and tensors[stored].shape == places[parameter]:
            # Stored as the module tree has it, under a name that the rule takes too.
            continue
        found.setdefault(parameter, (rule, []))[1].append((pattern, stored))
    return tuple(
        _conversion(blueprint, rule, parameter, members, tensors, places, source)
        for parameter, (rule, members) in found.items()
    )


def converted(checkpoint: Checkpoint, conversions: Iterable[Conversion]) -> Checkpoint:
    """``checkpoint`` with the parameters that ``conversions`` make, each computed when it is read, in the
    place of the stored tensors that they are made from."""
    by_first = {each.stored[0]: each for each in conversions}
    if not by_first:
        return checkpoint
    gone = {name for each in by_first.values() for name in each.stored}
    tensors: dict[str, TensorInfo] = {}
    computed: dict[str, Callable[[], Tensor]] = {}

    def value_of(conversion: Conversion, parameter: str) -> Callable[[], Tensor]:
        return lambda: conversion.value(parameter, checkpoint.tensor)

    for name, info in checkpoint.tensors.items():
        if name not in gone:
            tensors[name] = info
        elif name in by_first:
            for parameter, (dtype, shape) in by_first[name].parameters.items():
                nbytes = prod(shape) * ITEM_BYTES[dtype]
                tensors[parameter] = replace(info, name=parameter, dtype=dtype, shape=shape, nbytes=nbytes)
                computed[parameter] = value_of(by_first[name], parameter)
    return DerivedCheckpoint.of(checkpoint, tensors, computed, checkpoint.config)


class ConvertedTensors:
    """What :func:`converted` is for a checkpoint, for whatever else gives tensors by name.

    Args:
        path: folder of the checkpoint, for messages.
        tensors: as :func:`converted` has them.
        read: gives stored tensors.
        conversions: conversions to apply.
    """

    def __init__(
        self, path: object, tensors: Mapping[str, object], read: Read, conversions: Iterable[Conversion]
    ) -> None:
        self.path = path
        self.tensors = tensors
        self._read = read
        self._makers = {name: each for each in conversions for name in each.parameters}

    def tensor(self, name: str) -> Tensor:
        """The tensor ``name``, computed or as stored."""
        maker = self._makers.get(name)
        return self._read(name) if maker is None else maker.value(name, self._read)


@dataclass(frozen=True)
class _Shapes:
    """What the rules ask a model for: the shapes of its parameters."""

    places: Mapping[str, tuple[int, ...]]

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self.places[name], device="meta")


def _matching_rule(
    blueprint: Blueprint, stored: str, places: Mapping[str, object]
) -> tuple[Any, str | None, str]:
    """The first rule that takes a stored tensor to a parameter: rule, pattern, and the parameter's name."""
    renamed = name_in_memory(stored, blueprint.renamings)
    prefix = f"{blueprint.base_prefix}."
    for rule in blueprint.converters:
        name, pattern = rule.rename_source_key(renamed)
        if pattern is None:
            continue
        spellings = (name, name.removeprefix(prefix), prefix + name)
        return rule, pattern, next((each for each in spellings if each in places), name)
    return None, None, stored


def _conversion(
    blueprint: Blueprint,
    rule: WeightTransform,
    parameter: str,
    members: Sequence[tuple[str, str]],
    tensors: Mapping[str, TensorInfo],
    places: Mapping[str, tuple[int, ...]],
    source: str,
) -> Conversion:
    shapes = _Shapes(places)

    def convert(values: Sequence[Tensor]) -> dict[str, Tensor]:
        # ``add_tensor`` leaves tensors in the rule; a copy keeps those of one call out of the next.
        own: Any = deepcopy(rule)
        for (pattern, stored), value in zip(members, values, strict=True):
            own.add_tensor(parameter, stored, pattern, value)
        made = own.convert(parameter, model=shapes, config=blueprint.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    stored = tuple(name for _, name in members)
    infos = [tensors[name] for name in stored]
    try:
        made = convert(
            [torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta") for info in infos]
        )
    except Exception as error:  # noqa: BLE001 - rules raise what the operation at hand does
        raise CheckpointError(
            f"{source}: tensor {stored[0]!r}: {list(infos[0].shape)}: transformers' rule for {parameter} "
            f"does not take it ({type(error).__name__}: {error}); the checkpoint is incomplete or of another "
            "architecture than its config.json says"
        ) from None
    return Conversion(
        stored,
        {name: (dtype_name(value.dtype), tuple(value.shape)) for name, value in made.items()},
        convert,
    )
