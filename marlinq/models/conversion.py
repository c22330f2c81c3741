"""Converts stored tensors to parameters where more than a name differs.

Files of some families hold matrices split, joined, transposed or in another row order than the model, such as
a vision tower's ``qkv`` or the three short convolutions of a delta net. transformers has a rule for each
(``WeightConverter``). These rules are run tensor by tensor behind a view of the checkpoint whose tensors are
the model's parameters, so that no other file needs to know of them.
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
"""Function from a name to the stored tensor."""


@dataclass(frozen=True)
class Conversion:
    """A conversion of some stored tensors to some parameters of the model.

    Attributes:
        stored: names of the stored tensors, in the order of their numbers.
        parameters: full name of each resulting parameter -> dtype and shape.
        convert: function from the stored tensors, in the order of :attr:`stored`, to the parameters.
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
    """The conversions that a checkpoint needs; none where tensors are stored as the model has them.

    Fused experts whose matrices are stored one by one are left out: :meth:`TensorNames.places` finds them.

    Args:
        blueprint: the model.
        tensors: all stored tensors.
        source: folder of the checkpoint, for messages.
        packed: names of quantised modules' tensors, to which no rule applies.

    Raises:
        CheckpointError: stored tensors do not fit their rule.
    """
    if not blueprint.converters:
        return ()
    places = {
        **blueprint.parameters,
        **{name: blueprint.parameters[to] for name, to in blueprint.tied.items()},
    }
    by_target: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    names: TensorNames | None = None
    for stored in sorted(set(tensors) - set(packed), key=dot_natural_key):
        rule, pattern, parameter = _matching_rule(blueprint, stored, places)
        if rule is None or pattern is None or parameter not in places:
            # Tensors of a layer that the model does not have stay as they are stored.
            continue
        names = names or TensorNames(blueprint, tensors, source=source)
        if names.in_parts(parameter):
            continue
        if names.own(parameter) == stored and tensors[stored].shape == places[parameter]:
            # Stored as the model has it, under a name that the rule matches too.
            continue
        by_target.setdefault(parameter, (rule, []))[1].append((pattern, stored))
    return tuple(
        _conversion(blueprint, rule, parameter, members, tensors, places, source)
        for parameter, (rule, members) in by_target.items()
    )


def converted(checkpoint: Checkpoint, conversions: Iterable[Conversion]) -> Checkpoint:
    """A view of ``checkpoint`` with the results of ``conversions`` in the place of the tensors that they are
    made from; each is computed when it is read."""
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
    """A view like :func:`converted`'s, over any function that reads tensors by name.

    Args:
        path: folder of the checkpoint, for messages.
        tensors: tensors of the view.
        read: function that reads a stored tensor.
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
    """Stands for a model in transformers' rules, which ask it only for the shapes of parameters."""

    places: Mapping[str, tuple[int, ...]]

    def get_parameter(self, name: str) -> Tensor:
        return torch.empty(self.places[name], device="meta")


def _matching_rule(
    blueprint: Blueprint, stored: str, places: Mapping[str, object]
) -> tuple[Any, str | None, str]:
    """(rule, pattern, parameter's name) of the first rule that applies to a stored tensor, or None."""
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
        # A copy, because ``add_tensor`` leaves tensors in the rule.
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
