"""Maps parameter names of a model to tensor names of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from marlinq.checkpoint import Checkpoint, QuantizedCheckpoint, same_values
from marlinq.core.errors import CheckpointError
from marlinq.models.blueprint import Blueprint
from marlinq.models.projection import Projection

_BLOCK = re.compile(r"\.\d+\.")


class TensorNames:
    """Finds the stored tensor of a model's parameter.

    Checkpoints of one model exist with and without the base model's prefix (``transformer.h.0...`` and
    ``h.0...`` for GPT-2 and Falcon), and may omit one of two tied tensors. Some architectures have other
    names in files than in memory, for which transformers has renamings (GPT-NeoX stores ``lm_head`` as
    ``embed_out``). A name is looked up exactly, then without and with the prefix, then under the names that
    it is tied to.

    Args:
        blueprint: the model.
        tensors: all tensor names of the checkpoint.
        source: folder of the checkpoint, for messages.
    """

    def __init__(self, blueprint: Blueprint, tensors: Collection[str], *, source: str) -> None:
        self._stored = {name: name for name in tensors}
        # The renamings keep state and want the names sorted.
        for name in sorted(tensors):
            self._stored.setdefault(name_in_memory(name, blueprint.renamings), name)
        self._prefix = blueprint.base_prefix
        self._renamings = blueprint.renamings
        self._source = source
        self._fused = blueprint.fused
        self._ties: dict[str, list[str]] = {}
        for name, owner in blueprint.tied.items():
            self._ties.setdefault(owner, []).append(name)
            self._ties.setdefault(name, []).append(owner)

    def find(self, parameter: str) -> str | None:
        """Name of the stored tensor for ``parameter``, or None."""
        candidates = (parameter, *self._ties.get(parameter, ()))
        return next((own for name in candidates if (own := self.own(name)) is not None), None)

    def own(self, parameter: str) -> str | None:
        """Like :meth:`find`, without looking at tied parameters."""
        spellings = self._spellings(parameter)
        return next((self._stored[name] for name in spellings if name in self._stored), None)

    def stem(self, projection: Projection, suffix: str) -> str | None:
        """The checkpoint's name of the module of ``projection``, if a tensor ``<name>.<suffix>`` is stored.

        This also finds experts of a fused parameter in checkpoints that store each as a module.
        """
        return self._stem(projection.name, suffix)

    def _stem(self, module: str, suffix: str) -> str | None:
        stored = self.own(f"{module}.{suffix}")
        return None if stored is None else stored.removesuffix(f".{suffix}")

    def quantized(self, module: str, view: QuantizedCheckpoint) -> str | None:
        """Name in ``view`` of the model's linear ``module``; None where it is not quantised there."""
        stems = (self._stem(module, key) for key in view.format.keys)
        return next((stem for stem in stems if stem in view.modules), None)

    def places(self, parameter: str, shape: tuple[int, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, expected shape) of the stored tensors of a parameter of ``shape``.

        One tensor; for fused experts whose matrices are stored one by one, all of them in the order of
        :attr:`Blueprint.fused`.

        Raises:
            CheckpointError: no stored tensor belongs to the parameter, or to one of its experts.
        """
        if not self.in_parts(parameter):
            return ((self.require(parameter), shape),)
        return tuple(
            (self.require(f"{part.name}.weight"), (part.out_features, part.in_features))
            for part in self._fused[parameter]
        )

    def holder(self, projection: Projection) -> str:
        """Name of the stored tensor that holds the weight of ``projection``, alone or with other experts'.

        Raises:
            CheckpointError: none does.
        """
        alone = self.in_parts(projection.parameter)
        return self.require(f"{projection.name}.weight" if alone else projection.parameter)

    def in_parts(self, parameter: str) -> bool:
        """Whether at least one matrix of a fused parameter is stored as a tensor of its own."""
        if parameter not in self._fused or self.own(parameter) is not None:
            return False
        return any(self.own(f"{part.name}.weight") is not None for part in self._fused[parameter])

    def module(self, projection: Projection) -> str:
        """The name of ``projection`` as a module in the output's files.

        It is this checkpoint's name; a tied head has the model's name. An expert of a parameter that is
        stored whole gets the name that files of its family use, with the parameter's prefix.
        """
        stored = self.own(f"{projection.name}.weight")
        if stored is not None and stored.endswith(".weight"):
            return stored.removesuffix(".weight")
        stored = stored or (None if projection.whole else self.own(projection.parameter))
        if stored is None:
            return projection.name
        inner = projection.name.removeprefix(projection.module).removeprefix(".")
        for module in self._spellings(projection.module):
            if stored.startswith(module.rpartition(".")[0] + "."):
                return f"{module}.{inner}" if inner else module
        # The prefix may be renamed between files and memory, and so may names inside the block.
        beside = ".".join(part for part in (stored.rpartition(".")[0], inner) if part)
        in_file, in_tree = _BLOCK.search(stored), _BLOCK.search(projection.name)
        if in_file is None or in_tree is None:
            return beside
        block = stored[: in_file.end()] + projection.name[in_tree.end() :]
        return next((each for each in (beside, block) if self._means(each, projection)), projection.name)

    def _means(self, module: str, projection: Projection) -> bool:
        """Whether transformers maps the stored name ``module`` to ``projection``."""
        name = name_in_memory(f"{module}.weight", self._renamings)
        return name in self._spellings(f"{projection.name}.weight")

    def require(self, parameter: str) -> str:
        """The result of :meth:`find`, which must exist.

        Raises:
            CheckpointError: no stored tensor belongs to the parameter.
        """
        stored = self.find(parameter)
        if stored is None:
            spellings = " or ".join(repr(name) for name in self._spellings(parameter))
            raise CheckpointError(
                f"{self._source}: expected a tensor {spellings}, found none; the checkpoint is "
                "incomplete or of another architecture than its config.json says"
            )
        return stored

    def _spellings(self, name: str) -> Iterator[str]:
        yield name
        if self._prefix:
            bare = name.removeprefix(self._prefix + ".")
            yield bare if bare != name else f"{self._prefix}.{name}"


def without_false_ties(blueprint: Blueprint, checkpoint: Checkpoint) -> Blueprint:
    """The blueprint without ties between parameters whose stored tensors differ.

    A config may tie head and embedding although the file has different tensors for them; the tensors count.
    They are read only if both are stored, as in few checkpoints.

    Raises:
        CheckpointError: the checkpoint was changed or ends early.
    """
    names = TensorNames(blueprint, checkpoint.tensors.keys(), source=str(checkpoint.path))
    free: set[str] = set()
    for name, owner in blueprint.tied.items():
        own, shared = names.own(name), names.own(owner)
        if own is None or shared is None or own == shared:
            continue
        if not same_values(checkpoint, own, shared):
            free.add(name)
    return blueprint.without_ties(free) if free else blueprint


def name_in_memory(name: str, renamings: Sequence[Any]) -> str:
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
