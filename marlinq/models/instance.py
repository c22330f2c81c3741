"""A copy of a model on one device, whose parts are loaded when they are needed and released afterwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from marlinq.checkpoint import Checkpoint, ReadAhead
from marlinq.core.dtypes import dtype_name
from marlinq.core.errors import CheckpointError, UnsupportedError
from marlinq.models.blueprint import Blueprint
from marlinq.models.fused_experts import Experts
from marlinq.models.names import TensorNames
from marlinq.models.projection import Projection


class TensorSource(Protocol):
    """The part of a checkpoint that a model instance reads."""

    @property
    def path(self) -> object: ...

    @property
    def tensors(self) -> Mapping[str, object]: ...

    def tensor(self, name: str) -> Tensor: ...


class ModelInstance:
    """A copy of a model on one device, all of whose weights start on the meta device (without memory).

    A part is loaded, run and released again, so that memory holds only the parts in use.

    Args:
        blueprint: structure of the model.
        checkpoint: source of the tensors, which are read when needed; it may return them on the device.
        device: device of the weights.
        dtype: dtype of floating-point parameters.

    Attributes:
        model: the model; change its weights only through the methods here.
        names: finds the stored tensor of each parameter.
        source: folder of the checkpoint, for messages.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        checkpoint: TensorSource,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.blueprint = blueprint
        self.device = device
        self.dtype = dtype
        self.source = str(checkpoint.path)
        self.model: PreTrainedModel = blueprint.build()
        self._checkpoint = checkpoint
        self.names = TensorNames(blueprint, checkpoint.tensors.keys(), source=self.source)

    def weight(self, projection: Projection) -> Tensor:
        """The weight [N, K] of a projection in memory: a view of its parameter, in the instance's dtype."""
        return projection.view(self.model.get_parameter(projection.parameter))

    def replace(self, projection: Projection, weight: Tensor) -> None:
        """Overwrites the weight [N, K] of a projection in memory, cast to the instance's device and dtype."""
        weight = weight.to(device=self.device, dtype=self.dtype)
        if projection.whole:
            owner = self.model.get_submodule(projection.module)
            key = projection.parameter.rpartition(".")[2]
            owner._parameters[key] = nn.Parameter(projection.as_parameter(weight), requires_grad=False)
        else:
            with torch.no_grad():
                self.weight(projection).copy_(weight)

    def install(self, projection: Projection | Experts, module: nn.Module) -> None:
        """Replaces the module of a projection, or of fused experts, by ``module``.

        Raises:
            ValueError: the projection shares its parameter with others.
        """
        if isinstance(projection, Experts):
            self.model.set_submodule(projection.name, module)
            return
        if not projection.whole:
            raise ValueError(f"{projection.name}: part of {projection.parameter}, not a module of its own")
        self.model.set_submodule(projection.module, module)

    def read(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        """The stored tensor of a parameter, in its stored dtype, on the device that the source returns.

        Raises:
            CheckpointError: it is missing or its shape is not ``shape``.
        """
        return self._stored(self.names.require(parameter), shape)

    def stored_weight(self, projection: Projection) -> Tensor:
        """The stored weight [N, K] of a projection, in its stored dtype, on the device.

        Raises:
            CheckpointError: it is missing or has another shape.
        """
        stored = self.names.holder(projection)
        if self.names.in_parts(projection.parameter):
            shape = (projection.out_features, projection.in_features)
            return self._stored(stored, shape).to(self.device)
        whole = tuple(self.model.get_parameter(projection.parameter).shape)
        return projection.view(self._stored(stored, whole).to(self.device))

    def _stored(self, stored: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._checkpoint.tensor(stored)
        if tuple(tensor.shape) != tuple(shape):
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {stored!r}: expected shape {list(shape)} from config.json, "
                f"found {list(tensor.shape)}"
            )
        return tensor

    def _value(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter's value on the device; a floating-point one in the instance's dtype."""
        if not self.names.in_parts(parameter):
            return self._cast(parameter, self.read(parameter, shape))
        value = torch.empty(shape, dtype=self.dtype, device=self.device)
        places = self.names.places(parameter, shape)
        for projection, (stored, size) in zip(self.blueprint.fused[parameter], places, strict=True):
            projection.view(value).copy_(self._cast(stored, self._stored(stored, size)))
        return value

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """A stored tensor on the device; a floating-point one in the instance's dtype.

        Raises:
            UnsupportedError: a value is too large for that dtype.
        """
        if not tensor.is_floating_point():
            return tensor.to(self.device)
        value = tensor.to(self.device, self.dtype)
        wider = torch.finfo(tensor.dtype).max > torch.finfo(self.dtype).max
        if wider and not bool(torch.isfinite(value).all()) and bool(torch.isfinite(tensor).all()):
            largest, dtype = float(tensor.abs().max()), dtype_name(self.dtype)
            raise UnsupportedError(
                f"{self.source}: {name}: a value of {largest:.6g} overflows {dtype}; run in bfloat16"
            )
        return value

    def materialise(
        self, name: str, *, recurse: bool = True, skip: Collection[str] = frozenset()
    ) -> nn.Module:
        """Loads the parameters and buffers of the module ``name`` ("" is the model), except the parameters
        ``skip``; returns the module."""
        module: nn.Module = self.model.get_submodule(name)
        for inner, owner in list(module.named_modules()) if recurse else [("", module)]:
            path = ".".join(part for part in (name, inner) if part)
            for key, parameter in owner.named_parameters(recurse=False):
                full = f"{path}.{key}" if path else key
                if not parameter.is_meta or full in skip:
                    continue
                value = self._value(full, tuple(parameter.shape))
                owner._parameters[key] = nn.Parameter(value, requires_grad=False)
            for key, buffer in owner.named_buffers(recurse=False):
                owner._buffers[key] = self._buffer(owner, f"{path}.{key}" if path else key, key, buffer)
        return module

    def _buffer(self, owner: nn.Module, full: str, key: str, buffer: Tensor) -> Tensor:
        persistent = key not in owner._non_persistent_buffers_set
        if persistent and self.names.own(full) is not None:
            return self.read(full, tuple(buffer.shape)).to(self.device)
        return buffer.to(self.device)

    def release(self, name: str, *, recurse: bool = True) -> None:
        """Puts the parameters of the module ``name`` back on the meta device."""
        module = self.model.get_submodule(name)
        for owner in list(module.modules()) if recurse else [module]:
            for key, parameter in owner.named_parameters(recurse=False):
                owner._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    @contextmanager
    def loaded(self, name: str) -> Iterator[nn.Module]:
        """Inside, the module ``name`` has its weights in memory."""
        try:
            yield self.materialise(name)
        finally:
            self.release(name)

    def block(self, index: int) -> nn.Module:
        """Loads the weights of decoder block ``index``."""
        return self.materialise(self.blueprint.blocks[index].name)

    @contextmanager
    def reading_ahead(self, blocks: Sequence[int]) -> Iterator[None]:
        """Inside, on a GPU, threads read the tensors of the next of ``blocks`` while one is in use; no effect
        on a CPU."""
        checkpoint = self._checkpoint
        if self.device.type != "cuda" or not isinstance(checkpoint, Checkpoint):
            yield
            return
        names = [self._stored_in_block(index) for index in blocks]
        sizes = [sum(checkpoint.tensors[name].nbytes for name in block) for block in names]
        with ReadAhead(checkpoint, self.device, budget=max(sizes, default=0)) as ahead:
            self._checkpoint = ahead
            ahead.expect(name for block in names for name in block)
            try:
                yield
            finally:
                self._checkpoint = checkpoint

    def _stored_in_block(self, index: int) -> list[str]:
        """Names of the stored tensors that :meth:`block` reads, in its order."""
        path = self.blueprint.blocks[index].name
        names: list[str | None] = []
        for inner, owner in self.model.get_submodule(path).named_modules():
            start = ".".join(part for part in (path, inner) if part)
            for key, parameter in owner.named_parameters(recurse=False):
                full = f"{start}.{key}"
                if self.names.in_parts(full):
                    names += [stored for stored, _ in self.names.places(full, tuple(parameter.shape))]
                else:
                    names.append(self.names.own(full))
            names += [
                self.names.own(f"{start}.{key}")
                for key, _ in owner.named_buffers(recurse=False)
                if key not in owner._non_persistent_buffers_set
            ]
        return [name for name in names if name is not None]

    def release_block(self, index: int) -> None:
        """Puts the weights of decoder block ``index`` back on the meta device."""
        self.release(self.blueprint.blocks[index].name)

    @contextmanager
    def outer(self, *, whole: bool = False, seeing: bool = False) -> Iterator[nn.Module]:
        """Inside, all modules except blocks and head have their weights in memory.

        Yields the module that takes token ids and runs the blocks (:attr:`Blueprint.replay_root_name`), with
        ``whole`` the one that also returns logits (:attr:`Blueprint.text_root_name`), and with ``seeing`` the
        one that also runs vision and audio towers (:attr:`Blueprint.seeing_root_name`).
        """
        root_name = self.blueprint.text_root_name if whole else self.blueprint.replay_root_name
        if seeing:
            root_name = self.blueprint.seeing_root_name
        names = self._outer_modules(root_name)
        try:
            for name in names:
                self.materialise(name, recurse=False)
            yield self.model.get_submodule(root_name)
        finally:
            for name in names:
                self.release(name, recurse=False)

    def head_parameters(self) -> dict[str, Tensor]:
        """Loads the output head, which :meth:`outer` leaves out; call it inside :meth:`outer`.

        Returns:
            full name -> the parameter of the head's weight, which may be the embedding's.

        Raises:
            UnsupportedError: the model has no output head.
        """
        if self.blueprint.head is None:
            raise UnsupportedError(
                f"{self.source}: {self.blueprint.architecture} has no output head, by whose predictions "
                "tuning and the loss's gradients go; pass --tune-steps 0 and --no-output-hessian"
            )
        head = self.blueprint.by_name[self.blueprint.head]
        tied = self.blueprint.tied.get(head.parameter)
        if tied is not None:
            weight: Tensor = self.model.get_parameter(tied)
            self.materialise(head.module, skip={head.parameter})
        else:
            self.materialise(head.module)
            weight = self.model.get_parameter(head.parameter)
        return {head.parameter: weight}

    def _outer_modules(self, root_name: str) -> list[str]:
        inside = self.blueprint.blocks_name
        head = self.model.get_output_embeddings()
        modules = []
        for name, module in self.model.get_submodule(root_name).named_modules():
            full = ".".join(part for part in (root_name, name) if part)
            if full.startswith(inside + ".") or module is head:
                continue
            modules.append(full)
        return modules

    def whole_model(self) -> nn.Module:
        """Loads the whole model; tied parameters share one tensor."""
        model = self.materialise("", skip=self.blueprint.tied)
        for name, owner in self.blueprint.tied.items():
            module_name, _, key = name.rpartition(".")
            owner_parameter = model.get_parameter(owner)
            model.get_submodule(module_name)._parameters[key] = owner_parameter
        return model
