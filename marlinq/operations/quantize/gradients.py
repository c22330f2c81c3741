"""Gradients of the loss at the outputs of a block's projections, for methods that use them.

The loss is the cross-entropy on labels drawn from the original's own predictions. The second moment of its
gradients is the Fisher information: the curvature of the KL divergence from the original (Martens and Grosse
2015). One backward pass through the original stores the gradient of the residual stream between all blocks.
When a block is quantised, a backward pass through this block alone gives the gradients at its projections.
Memory therefore grows with the text, not with the number of projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from marlinq.calibration import Batch, HiddenStates
from marlinq.core.errors import NumericsError
from marlinq.core.progress import ReportProgress
from marlinq.methods.hessian import HessianAccumulator
from marlinq.models import BlockReplay, ModelInstance, Projection
from marlinq.operations.quantize.drawing import draw
from marlinq.operations.quantize.reproducible import reproducible, reproducible_attention

_STAGE = "gradients of the loss"


class LossGradients:
    """Gradients of the loss at the residual stream after every block.

    Args:
        instance: the loaded original, without any block's weights in memory.
        replay: replay of the instance, with the batches recorded.
        batches: the text.
        jobs: numbers of the batches that gradients are taken on, in any order; a repeated number gets newly
            drawn labels.
        states: hidden states that enter the first block, of every batch.
        logits: tokens whose logits are in memory at once.
        seed: seed of the labels.
        folder: folder for hidden states that don't fit memory.
        device_bytes: bytes of hidden states that may stay on the device.
        progress: called for every block of the forward and of the backward pass.

    Raises:
        NumericsError: a gradient is NaN or infinite.
        UnsupportedError: the model has no output head.
    """

    def __init__(
        self,
        instance: ModelInstance,
        replay: BlockReplay,
        batches: Sequence[Batch],
        jobs: Sequence[int],
        states: HiddenStates,
        *,
        logits: int,
        seed: int,
        folder: Path,
        device_bytes: int,
        progress: ReportProgress,
    ) -> None:
        self._instance, self._replay = instance, replay
        self._batches, self._jobs = batches, list(jobs)
        like = states.load(self._jobs[0])
        self._count = len(instance.blueprint.blocks)
        shapes = [(*batches[number].ids.shape, *like.shape[2:]) for number in self._jobs]
        # The forward pass fills this with the stream after every block; the backward pass replaces each
        # entry by its gradient.
        self._stream = HiddenStates(
            shapes * (self._count + 1),
            dtype=like.dtype,
            device=instance.device,
            limit_bytes=psutil.virtual_memory().available // 4,
            folder=folder,
            device_bytes=device_bytes,
        )
        for job, number in enumerate(self._jobs):
            self._stream.store(job, states.load(number))
        with _passes(instance.device):
            self._forward(progress)
            self._predict(logits, seed)
            self._backward(progress)

    def moments(
        self, index: int, projections: Sequence[Projection], states: HiddenStates
    ) -> dict[str, HessianAccumulator]:
        """Second moments (sums of outer products, [N, N]) of the gradients at projections' outputs, by name.

        Args:
            index: index of the block, whose original weights are in memory.
            projections: projections that are modules of their own, not parts of a fused parameter.
            states: hidden states that enter the block, of every batch.
        """
        moments = {
            each.name: HessianAccumulator(each.out_features, device=self._instance.device, name=each.name)
            for each in projections
        }
        with _passes(self._instance.device), ExitStack() as stack:
            for each in projections:
                module = self._instance.model.get_submodule(each.module)
                hook = partial(_listen, moments[each.name].add)
                stack.callback(module.register_forward_hook(hook).remove)
            for job, number in enumerate(self._jobs):
                self._back(index, job, states.load(number))
        return moments

    def weight_gradients(
        self, index: int, parameters: Sequence[str], states: HiddenStates
    ) -> Iterator[dict[str, Tensor]]:
        """Gradients of each job's loss at weights of a block.

        Args:
            index: index of the block, whose original weights are in memory.
            parameters: full names of the weights.
            states: hidden states that enter the block, of every batch.

        Yields:
            for each job, in order, name -> gradient in the weight's shape.
        """
        with _passes(self._instance.device):
            for job, number in enumerate(self._jobs):
                leaves = {
                    name: self._instance.model.get_parameter(name).detach().requires_grad_()
                    for name in parameters
                }
                with torch.enable_grad():
                    output = self._replay.call(index, number, states.load(number), leaves)
                behind = self._stream.load(self._place(index + 1, job))
                gradients = torch.autograd.grad(
                    output, list(leaves.values()), behind, allow_unused=True, materialize_grads=True
                )
                yield dict(zip(leaves, gradients, strict=True))

    def _place(self, index: int, job: int) -> int:
        return index * len(self._jobs) + job

    def _forward(self, progress: ReportProgress) -> None:
        with self._instance.reading_ahead(range(self._count)):
            for index in range(self._count):
                self._instance.block(index)
                for job, number in enumerate(self._jobs):
                    hidden = self._stream.load(self._place(index, job))
                    self._stream.store(self._place(index + 1, job), self._replay.run(index, number, hidden))
                self._instance.release_block(index)
                progress(_STAGE, index + 1, 2 * self._count)

    def _predict(self, chunk: int, seed: int) -> None:
        """Replaces the last block's outputs by the gradients of the loss at them."""
        generator = torch.Generator(self._instance.device).manual_seed(seed)
        with self._instance.outer(whole=True):
            head = self._instance.head_parameters()
            for job, number in enumerate(self._jobs):
                place = self._place(self._count, job)
                hidden = self._stream.load(place)
                real = self._batches[number].mask().to(hidden.device)
                gradient = torch.zeros_like(hidden)
                gradient[real] = torch.cat(
                    [
                        _slope(rows, lambda x: self._replay.logits(x, head), generator)
                        for rows in torch.split(hidden[real], chunk)
                    ]
                )
                self._stream.store(place, gradient)
        self._instance.release(self._instance.blueprint.by_name[self._instance.blueprint.head or ""].module)

    def _backward(self, progress: ReportProgress) -> None:
        finite = []
        # The gradient at the first block's input is not used.
        order = range(self._count - 1, 0, -1)
        with self._instance.reading_ahead(order):
            for done, index in enumerate(order):
                self._instance.block(index)
                for job in range(len(self._jobs)):
                    place = self._place(index, job)
                    gradient = self._back(index, job, self._stream.load(place))
                    finite.append(torch.isfinite(gradient).all())
                    self._stream.store(place, gradient)
                self._instance.release_block(index)
                progress(_STAGE, self._count + done + 1, 2 * self._count)
        progress(_STAGE, 2 * self._count, 2 * self._count)
        if finite and not bool(torch.stack(finite).all()):
            raise NumericsError(
                f"{self._instance.source}: the loss's gradients hold NaN or infinity in "
                f"{str(self._instance.dtype).removeprefix('torch.')}; pass --no-output-hessian"
            )

    def _back(self, index: int, job: int, hidden: Tensor) -> Tensor:
        """The gradient at a block's input ``hidden``, from the stored gradient at its output."""
        leaf = hidden.requires_grad_()
        with torch.enable_grad():
            # A block may change its input in place.
            output = self._replay.call(index, self._jobs[job], leaf * 1, {})
        # inputs=[leaf]: no gradients of weights are computed, only the input's and those that hooks read.
        behind = self._stream.load(self._place(index + 1, job))
        torch.autograd.backward(output, behind, inputs=[leaf])
        assert leaf.grad is not None
        return leaf.grad


def _listen(receive: Callable[[Tensor], None], module: nn.Module, given: Any, output: Tensor) -> None:
    """Forward hook of a module: ``receive`` is called with the gradient at its output."""
    if output.requires_grad:
        output.register_hook(receive)  # type: ignore[no-untyped-call]


def _slope(rows: Tensor, predict: Callable[[Tensor], Tensor], generator: torch.Generator) -> Tensor:
    """The gradient [R, H] at ``rows`` of the cross-entropy on labels drawn from their own predictions."""
    leaf = rows.detach().requires_grad_()
    with torch.enable_grad():
        logits = predict(leaf)
    with torch.no_grad():
        slope = logits.float().softmax(-1)
        labels = draw(slope, generator).unsqueeze(-1)
        slope.scatter_add_(-1, labels, slope.new_full(labels.shape, -1.0))
    torch.autograd.backward(logits, slope.to(logits.dtype), inputs=[leaf])
    assert leaf.grad is not None
    return leaf.grad


@contextmanager
def _passes(device: torch.device) -> Iterator[None]:
    """Inside, forward and backward passes give the same bits in every run."""
    with reproducible(device), reproducible_attention(device):
        yield
