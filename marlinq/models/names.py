"""Between the parameter names of a module tree and the tensor names of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from marlinq.core.errors import CheckpointError
from marlinq.models.blueprint import Blueprint
from marlinq.models.projection import Projection


class TensorNames:
    """Finds the checkpoint tensor of a module parameter.

    Checkpoints of one model exist with and without the prefix of the base model (``transformer.h.0...`` and
    ``h.0...`` for GPT-2 and Falcon), leave out one of two tied tensors, and some architectures have other
    names in files than in memory, which transformers knows (GPT-NeoX stores ``lm_head`` as ``embed_out``).
    A name is looked up exactly, then without and with that prefix, then under the names it is tied to.

    Args:
        blueprint: the model.
        tensors: all tensor names of the checkpoint.
        source: folder of the checkpoint, for messages.
    """

    def __init__(self, blueprint: Blueprint, tensors: Collection[str], *, source: str) -> None:
        self._stored = {name: name for name in tensors}
        # The renamings keep state and want the names sorted.
        for name in sorted(tensors):
            self._stored.setdefault(_name_in_memory(name, blueprint.renamings), name)
        self._prefix = blueprint.base_prefix
        self._source = source
        self._ties: dict[str, list[str]] = {}
        for name, owner in blueprint.tied.items():
            self._ties.setdefault(owner, []).append(name)
            self._ties.setdefault(name, []).append(owner)

    def find(self, parameter: str) -> str | None:
        """The checkpoint's name of ``parameter``, or None when no such tensor is stored."""
        candidates = (parameter, *self._ties.get(parameter, ()))
        return next((found for name in candidates if (found := self.own(name)) is not None), None)

    def own(self, parameter: str) -> str | None:
        """Like :meth:`find`, without looking at tied parameters."""
        spellings = self._spellings(parameter)
        return next((self._stored[name] for name in spellings if name in self._stored), None)

    def stem(self, projection: Projection, suffix: str) -> str | None:
        """What the checkpoint calls the module of ``projection``, where it stores ``<that>.<suffix>`` of it.

        An expert of a fused parameter is a module of its own in checkpoints that store it so.
        """
        stored = self.own(f"{projection.name}.{suffix}")
        return None if stored is None else stored.removesuffix(f".{suffix}")

    def require(self, parameter: str) -> str:
        """Like :meth:`find`.

        Raises:
            CheckpointError: no stored tensor belongs to the parameter.
        """
        found = self.find(parameter)
        if found is None:
            spellings = " or ".join(repr(name) for name in self._spellings(parameter))
            raise CheckpointError(
                f"{self._source}: expected a tensor {spellings}, found none; the checkpoint is "
                "incomplete or of another architecture than its config.json says"
            )
        return found

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix:
            bare = name.removeprefix(self._prefix + ".")
            yield bare if bare != name else f"{self._prefix}.{name}"


def _name_in_memory(name: str, renamings: Sequence[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
