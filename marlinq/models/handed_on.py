"""Values that decoder blocks pass to later blocks besides the hidden states.

Two ways are known. Blocks write to a mapping that all are called with (keys and values that later layers
share), or return values behind the hidden states that the next block is called with (positions that an
indexer chose). Recorded calls hold a marker in place of such a value; a pass over the text holds values.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from marlinq.core.errors import UnsupportedError


@dataclass(frozen=True)
class Shared:
    """Placeholder for a mapping that blocks write to.

    Attributes:
        number: index of the mapping among those of a forward pass.
        kind: class of the mapping.
    """

    number: int
    kind: type[MutableMapping[Any, Any]]


@dataclass(frozen=True)
class Returned:
    """Placeholder for the value number ``place`` that the previous block returned after its hidden states."""

    place: int


class Markers:
    """The placeholders for the values that blocks pass on in one outer forward."""

    def __init__(self) -> None:
        self._mappings: list[MutableMapping[Any, Any]] = []
        self._returned: list[Tensor] = []
        self._latest = 0
        self.returned = False
        """Whether a block was called with a value that the previous block returned."""

    def returns(self, count: int) -> tuple[Tensor, ...]:
        """``count`` new tensors that a stub returns after the hidden states, recognised by identity."""
        values = tuple(torch.empty(0) for _ in range(count))
        self._latest = len(self._returned)
        self._returned += values
        return values

    def of(self, name: str, value: Any) -> Shared | Returned | None:
        """The placeholder for an argument of block ``name``; None for an ordinary argument.

        Raises:
            UnsupportedError: the value comes from a block before the previous one.
        """
        if isinstance(value, MutableMapping):
            for number, known in enumerate(self._mappings):
                if known is value:
                    return Shared(number, type(value))
            if value:
                return None
            self._mappings.append(value)
            return Shared(len(self._mappings) - 1, type(value))
        for index, each in enumerate(self._returned):
            if each is value:
                if index < self._latest:
                    raise UnsupportedError(
                        f"{name}: expected no value of another block than the one before it; such models "
                        "can't run block by block"
                    )
                self.returned = True
                return Returned(index - self._latest)
        return None


class HandedOn:
    """The values passed on in one pass over the text, for each batch, in host memory.

    Args:
        device: device that blocks run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shared: dict[tuple[int, int], dict[Any, Any]] = {}
        # Values of the two latest blocks, because a block is run several times before the next.
        self._returned: dict[int, dict[int, tuple[Any, ...]]] = {}

    def shared(self, name: str, batch: int, marker: Shared) -> MutableMapping[Any, Any]:
        """The mapping before block ``name`` runs, on the device.

        Raises:
            UnsupportedError: gradients are wanted, which would have to flow to the block that wrote to it.
        """
        mapping = marker.kind()
        for key, value in self._shared.get((batch, marker.number), {}).items():
            if torch.is_grad_enabled() and _has_gradient(value):
                raise _no_gradients(name)
            mapping[key] = _moved(value, self._device)
        return mapping

    def returned(self, name: str, block: int, batch: int, marker: Returned) -> Any:
        """The value that block ``block - 1`` returned, on the device.

        Raises:
            UnsupportedError: gradients are wanted, or blocks run in another order (as in a backward pass).
        """
        values = self._returned.get(batch, {}).get(block - 1)
        if values is None or (torch.is_grad_enabled() and _has_gradient(values[marker.place])):
            raise _no_gradients(name)
        return _moved(values[marker.place], self._device)

    def keep_shared(self, batch: int, marker: Shared, mapping: MutableMapping[Any, Any]) -> None:
        """Stores the values that a block wrote to a mapping from :meth:`shared`."""
        kept = self._shared.setdefault((batch, marker.number), {})
        for key, value in mapping.items():
            kept[key] = _moved(value, torch.device("cpu"))

    def keep_returned(self, block: int, batch: int, values: Sequence[Any]) -> None:
        """Stores the values that block ``block`` returned after the hidden states."""
        latest = self._returned.get(batch, {})
        before = {block - 1: latest[block - 1]} if block - 1 in latest else {}
        self._returned[batch] = {**before, block: _moved(tuple(values), torch.device("cpu"))}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(each, device) for each in value)
    return value


def _has_gradient(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_has_gradient, value))
    return isinstance(value, Tensor) and value.is_floating_point()


def _no_gradients(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name}: reads values of another block, through which no gradients are followed; quantise without "
        "tuning, --output-hessian, --target-bits and --target-size"
    )
