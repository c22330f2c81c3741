"""The quantised model with trainable codes, scales and vectors.

Codes and scales of all blocks stay on the device; a block's dense weights exist only while it runs. Of the
forward pass only the input of each block is kept, and the backward pass runs the block again. Where memory
allows, :meth:`Student.forward_kept` keeps all of autograd's tensors instead, for the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from marlinq.core.weight import QuantizedWeight
from marlinq.methods.tuning import TunableVector, TunableWeight
from marlinq.models import BlockReplay, ModelInstance
from marlinq.operations.quantize.planned_module import PlannedModule
from marlinq.operations.quantize.planning import OutputPlan
from marlinq.operations.quantize.reproducible import reproducible_attention

Kept = tuple[Tensor, Tensor]
"""(input, output) of a block, connected by autograd's graph."""


def backward_kept(kept: list[Kept], gradient: Tensor) -> None:
    """The backward pass after :meth:`Student.forward_kept`, as :meth:`Student.backward`; empties ``kept``."""
    while kept:
        leaf, output = kept.pop()
        torch.autograd.backward(output, gradient)
        gradient = leaf.grad  # type: ignore[assignment]


class Student:
    """The quantised blocks and their trainable parameters.

    Args:
        instance: the loaded model, without any weights in memory. The blocks' unquantised parameters stay in
            memory afterwards.
        replay: replay of the instance, with the batches recorded.
        plan: plan with the quantised projections.
        quantized: name of a projection in a block -> its quantised weight.
        codes: whether codes are tuned.
        vectors: whether unquantised parameters of one dimension (norms, biases) are tuned.

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
        # Tuned codes start from the original weights, which are read ahead; else little is read.
        blocks = range(len(instance.blueprint.blocks) if codes else 0)
        with instance.reading_ahead(blocks):
            for block in instance.blueprint.blocks:
                members = plan.members(block)
                self._members.append(members)
                for planned in members:
                    name = planned.projection.name
                    weight = quantized[name].to(instance.device)
                    # Float elements keep their codes: only scales are tuned.
                    integers = weight.element.table is None
                    original = instance.stored_weight(planned.projection) if codes and integers else None
                    self.weights[name] = TunableWeight(weight, original, name=name)
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
            stored = instance.read(name, tuple(shape)).to(instance.device)
            self.vectors[name] = TunableVector(stored, added=name.endswith("bias"))

    def _outer_vectors(self) -> list[str]:
        """Names of vectors outside the blocks. Those before the first block get no gradient, so they stay as
        they are."""
        blueprint = self._instance.blueprint
        return [
            name
            for name, parameter in self._instance.model.named_parameters()
            if parameter.dim() == 1
            and not name.startswith(blueprint.blocks_name + ".")
            and name not in blueprint.tied
        ]

    def outer_parameters(self) -> dict[str, Tensor]:
        """Full name -> tuned parameter outside the blocks, differentiable."""
        return {name: self.vectors[name].dense() for name in self._outside}

    def outer_leaves(self) -> list[Tensor]:
        """The tensors that an optimiser changes for parameters outside the blocks."""
        return [self.vectors[name].change for name in self._outside]

    def forward(self, batch: int, hidden: Tensor) -> tuple[list[Tensor], Tensor]:
        """(input of each block, output of the last), all float32 [B, T, H]."""
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
        """Adds gradients to all blocks' parameters.

        Args:
            batch: number of the batch that :meth:`forward` ran.
            inputs: inputs of the blocks from :meth:`forward`; emptied.
            gradient: gradient of the loss at the output of the last block.
            after_block: called when a block's gradients are complete, from the last block to the first. It
                may change the block's parameters, which earlier blocks don't use.
        """
        for index in reversed(range(len(self._members))):
            # detach: a tensor of its own for autograd, since the caller may write to the input again.
            leaf = inputs.pop().detach().requires_grad_()
            with torch.enable_grad(), self._precision():
                output = self._call(index, batch, leaf * 1)
            torch.autograd.backward(output, gradient)
            gradient = leaf.grad  # type: ignore[assignment]
            if after_block is not None:
                after_block()

    def forward_kept(self, batch: int, hidden: Tensor) -> tuple[list[Kept], Tensor]:
        """Does the same as :meth:`forward`, and keeps autograd's tensors for :func:`backward_kept`."""
        kept = []
        for index in range(len(self._members)):
            leaf = hidden.detach().requires_grad_()
            with torch.enable_grad(), self._precision():
                hidden = self._call(index, batch, leaf * 1)
            kept.append((leaf, hidden))
        return kept, hidden.detach()

    def kept_bytes(self, batch: int, hidden: Tensor) -> int:
        """GPU bytes that :meth:`forward_kept` keeps for a micro-batch: those of the first block times the
        number of blocks."""
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
            # Autocast multiplies in bfloat16, so a whole parameter is made in bfloat16 directly.
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
        """Inside, a GPU multiplies in bfloat16; sums, norms and the residual stream stay in float32."""
        if not self._rounds:
            yield
            return
        with torch.autocast("cuda", torch.bfloat16), reproducible_attention(self._instance.device):
            yield
