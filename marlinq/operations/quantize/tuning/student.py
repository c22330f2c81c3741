"""The quantised model with weights that follow a gradient.

Codes and scales of all blocks stay on the device; a block's dense weights exist while it runs. Nothing of the
forward pass is kept but what enters each block: the backward pass runs a block again. Where memory allows,
:meth:`Student.forward_kept` keeps all of it instead; the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight
from marlinq.methods.tuning import TunableVector, TunableWeight
from marlinq.models import BlockReplay, ModelInstance
from marlinq.operations.quantize.planning import OutputPlan, PlannedModule
from marlinq.operations.quantize.reproducible import reproducible_attention

Kept = tuple[Tensor, Tensor]
"""What entered a block, and what left it; autograd's graph leads from one to the other."""


def backward_kept(kept: list[Kept], gradient: Tensor) -> None:
    """As :meth:`Student.backward`, of :meth:`Student.forward_kept`; empties ``kept``."""
    while kept:
        leaf, output = kept.pop()
        torch.autograd.backward(output, gradient)
        gradient = leaf.grad  # type: ignore[assignment]


class Student:
    """The quantised blocks, and what is tuned in them.

    Args:
        instance: the model, nothing materialised. Blocks stay materialised, but for the planned weights.
        replay: replay of the instance, with the batches recorded.
        plan: plan with the quantised projections.
        quantized: their weights by the projection's name, those of the blocks.
        codes: codes follow the gradient too.
        vectors: parameters of one dimension that stay unquantised (norms, biases) do.

    Attributes:
        weights: tunable weights by the projection's name.
        vectors: tunable vectors by the parameter's full name.
    """

    def __init__(
        self,
        instance: ModelInstance,
        replay: BlockReplay,
        plan: OutputPlan,
        quantized: Mapping[str, QuantizedWeight],
        *,
        codes: bool,
        vectors: bool,
    ) -> None:
        self._instance = instance
        self._rounds = instance.device.type == "cuda"
        self._replay = replay
        self.weights: dict[str, TunableWeight] = {}
        self.vectors: dict[str, TunableVector] = {}
        self._members: list[list[PlannedModule]] = []
        self._inside: list[list[str]] = []
        # Where the originals are of no interest, little is read.
        blocks = range(len(instance.blueprint.blocks) if codes else 0)
        with instance.reading_ahead(blocks):
            for block in instance.blueprint.blocks:
                members = plan.members(block)
                self._members.append(members)
                for planned in members:
                    name = planned.projection.name
                    weight = quantized[name].to(instance.device)
                    self.weights[name] = TunableWeight(
                        weight, self._original(planned) if codes else None, name=name
                    )
                replaced = {planned.projection.parameter for planned in members if planned.projection.whole}
                module = instance.materialise(block.name, skip=replaced)
                self._inside.append(
                    [f"{block.name}.{key}" for key, value in module.named_parameters() if value.dim() == 1]
                    if vectors
                    else []
                )
        self._outside = self._outer_vectors() if vectors else []
        for name in (*(name for names in self._inside for name in names), *self._outside):
            shape = instance.model.get_parameter(name).shape
            self.vectors[name] = TunableVector(instance.read(name, tuple(shape)).to(instance.device))

    def _original(self, planned: PlannedModule) -> Tensor:
        projection = planned.projection
        shape = tuple(self._instance.model.get_parameter(projection.parameter).shape)
        stored = self._instance.read(projection.parameter, shape)
        return projection.view(stored.to(self._instance.device))

    def _outer_vectors(self) -> list[str]:
        """Vectors outside the blocks; those before them get no gradient and stay as they are."""
        blueprint = self._instance.blueprint
        return [
            name
            for name, parameter in self._instance.model.named_parameters()
            if parameter.dim() == 1
            and not name.startswith(blueprint.blocks_name + ".")
            and name not in blueprint.tied
        ]

    def outer_parameters(self) -> dict[str, Tensor]:
        """The tuned parameters outside the blocks by full name; differentiable."""
        return {name: self.vectors[name].dense() for name in self._outside}

    def outer_leaves(self) -> list[Tensor]:
        """What an optimiser changes of them."""
        return [self.vectors[name].change for name in self._outside]

    def forward(self, batch: int, hidden: Tensor) -> tuple[list[Tensor], Tensor]:
        """What enters each block, and what leaves the last, float32 [B, T, H] each."""
        inputs = []
        for index in range(len(self._members)):
            inputs.append(hidden)
            with torch.no_grad(), self._precision():
                # A block may change its input in place.
                hidden = self._call(index, batch, hidden.clone())
        return inputs, hidden

    def backward(
        self,
        batch: int,
        inputs: list[Tensor],
        gradient: Tensor,
        after_block: Callable[[], None] | None = None,
    ) -> None:
        """Adds to the gradients of all blocks' parameters.

        Args:
            batch: as for the forward pass.
            inputs: result of :meth:`forward`; emptied.
            gradient: gradient of the loss with respect to what left the last block.
            after_block: called when a block's gradients are there, from the last block to the first. It may
                change the block's parameters: the blocks before it are run without them.
        """
        for index in reversed(range(len(self._members))):
            # Of its own: whoever holds the input goes on writing to it.
            leaf = inputs.pop().detach().requires_grad_()
            with torch.enable_grad(), self._precision():
                output = self._call(index, batch, leaf * 1)
            torch.autograd.backward(output, gradient)
            gradient = leaf.grad  # type: ignore[assignment]
            if after_block is not None:
                after_block()

    def forward_kept(self, batch: int, hidden: Tensor) -> tuple[list[Kept], Tensor]:
        """As :meth:`forward`, with all that :func:`backward_kept` needs to run no block again."""
        kept = []
        for index in range(len(self._members)):
            leaf = hidden.detach().requires_grad_()
            with torch.enable_grad(), self._precision():
                hidden = self._call(index, batch, leaf * 1)
            kept.append((leaf, hidden))
        return kept, hidden.detach()

    def kept_bytes(self, batch: int, hidden: Tensor) -> int:
        """What :meth:`forward_kept` keeps for a micro-batch on a GPU, blocks taken to be as the first."""
        device = self._instance.device
        with torch.enable_grad(), self._precision():
            before = torch.cuda.memory_allocated(device)
            output = self._call(0, batch, hidden.clone().requires_grad_() * 1)
            after = torch.cuda.memory_allocated(device)
        del output
        return (after - before) * len(self._members)

    def _call(self, index: int, batch: int, hidden: Tensor) -> Tensor:
        return self._replay.call(index, batch, hidden, self._parameters(index))

    def _parameters(self, index: int) -> dict[str, Tensor]:
        parameters = {name: self.vectors[name].dense() for name in self._inside[index]}
        for planned in self._members[index]:
            projection = planned.projection
            # Where products round to bfloat16 anyway, a weight of its own is made so at once.
            dtype = torch.bfloat16 if projection.whole and self._rounds else torch.float32
            weight = self.weights[projection.name].dense(dtype)
            if projection.whole:
                parameters[projection.parameter] = weight.t() if projection.transposed else weight
                continue
            if projection.parameter not in parameters:
                parameters[projection.parameter] = self._instance.model.get_parameter(
                    projection.parameter
                ).clone()
            projection.view(parameters[projection.parameter]).copy_(weight)
        return parameters

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Products in bfloat16 on a GPU; sums, norms and the residual stream stay in float32."""
        if not self._rounds:
            yield
            return
        with torch.autocast("cuda", torch.bfloat16), reproducible_attention(self._instance.device):
            yield
